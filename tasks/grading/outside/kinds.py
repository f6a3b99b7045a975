"""Names of the graders that call something outside: a service, a language model, a program in a sandbox. One a file.

They are Cairn's own code and wait rather than compute. So they run in the driver, many requests at a time
(`cairn.tasks.grading.outside.service`).
"""

from typing import TYPE_CHECKING

from cairn.configs.plugins import BadPlugin

if TYPE_CHECKING:
    from cairn.configs.schema.reward import RewardConfig
    from cairn.tasks.grading.outside.service import Outside

STORED = ("judge", "remote_rm")
"""Graders whose answers cost something, and are stored by default."""


def outside(config: "RewardConfig") -> "Outside":
    """Return the grader that `config.rm_type` names. Raises BadPlugin where an option that it needs is not set, or
    where this machine lacks what it needs."""
    match config.rm_type:
        case "judge":
            if config.judge is None:
                raise BadPlugin("the grader 'judge' calls a language model: set reward.judge, with its url and model")
            from cairn.tasks.grading.outside.judge import Judge

            return Judge(config.judge, config.rm_concurrency)
        case "remote_rm":
            if config.rm_url is None:
                raise BadPlugin("the grader 'remote_rm' calls a service: set reward.rm_url to its address")
            from cairn.tasks.grading.outside.remote_rm import RemoteRM

            return RemoteRM(config)
        case "code":
            from cairn.configs.schema.reward import CodeConfig
            from cairn.tasks.grading.outside.code import Code

            return Code(config.code or CodeConfig())
    raise BadPlugin(f"there is no grader {config.rm_type!r} that calls a service")
