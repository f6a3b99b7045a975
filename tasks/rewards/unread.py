"""Options of `reward` that none of a run's graders reads: whoever set one meant something by it."""

from collections.abc import Callable, Collection, Iterator

from cairn.configs.schema.reward import RewardConfig
from cairn.tasks.rewards import OUTSIDE, NamedGrader, gives_a_number
from cairn.tasks.rewards.opening import keeps_answers

Reads = Callable[[RewardConfig, NamedGrader], bool]


def _in_processes(config: RewardConfig, grader: NamedGrader) -> bool:
    return grader.name not in OUTSIDE


def _calls_side_by_side(config: RewardConfig, grader: NamedGrader) -> bool:
    if grader.name in OUTSIDE:
        return grader.name in ("judge", "remote_rm")
    # The answers of one that is remembered are written after so many calls.
    return grader.waits or (grader.name == config.custom_rm_path and keeps_answers(config))


_READ: dict[str, tuple[str, Reads]] = {
    "reward_key": (
        "only remote_rm, and graders that give a mapping, read it",
        lambda config, grader: grader.name == "remote_rm" or not gives_a_number(grader),
    ),
    "rm_timeout": (
        "judge has a reward.judge.timeout of its own, and code a reward.code.test_timeout",
        lambda config, grader: grader.name not in ("code", "judge"),
    ),
    "rm_memory": ("only graders in processes read it", _in_processes),
    "rm_batch_size": (
        "only graders of `samples` read it, and with group_rm none",
        lambda config, grader: grader.takes.several and not config.group_rm,
    ),
    "rm_concurrency": ("only remote_rm, judge, and graders that are coroutine functions read it", _calls_side_by_side),
    "num_workers": (
        "only graders in processes read it; code has a reward.code.num_workers",
        _in_processes,
    ),
}


def unread_options(config: RewardConfig, graders: Collection[NamedGrader]) -> Iterator[str]:
    """A sentence on each that is not left at its default. `graders`: those of the training samples and of the
    benchmarks; rows may name others of ours, which read no more."""
    names = " and ".join(dict.fromkeys(grader.name for grader in graders))
    for option, (who, reads) in _READ.items():
        value = getattr(config, option)
        usual = value == RewardConfig.model_fields[option].default
        if graders and not usual and not any(reads(config, grader) for grader in graders):
            yield f"reward.{option} ({value}) has no effect while the grader is {names}: {who}; leave it out"
