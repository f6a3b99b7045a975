"""How samples are graded."""

from pydantic import Field, model_validator

from cairn.configs.schema.base import Code, Section
from cairn.configs.schema.graders import ENVIRONMENT_NAME, CodeConfig, JudgeConfig, RewardModelConfig
from cairn.configs.schema.location import Location


class RewardConfig(Section):
    """The grader and its limits."""

    rm_type: str = "math"
    """Built-in grader: `math` (math-verify), `exact_match`, `random`, `reasoning_gym`, or one of a benchmark, such as
    `gsm8k`; see docs/rewards.md for the answer that counts; `episode` takes what the generate function gave
    (docs/agents.md). slime: `--rm-type`."""

    custom_rm_path: Code | None = None
    """Grader of your own, by import path (`package.module.function`) or file (`rewards.py:function`); it takes
    precedence over `rm_type`. slime: `--custom-rm-path`."""

    rm_type_key: str | None = "rm_type"
    """Field of a row's metadata that names a grader of Cairn's for this row, before `rm_type` and behind
    `custom_rm_path`; null: rows name none."""

    group_rm: bool = False
    """Grade the samples of a group together: the grader, one of your own of `samples`, is called once a group, when all
    of its samples are there. slime: `--group-rm`."""

    reward_key: str = "reward"
    """Which entry is the reward where the grader returns a mapping; the others are recorded beside it. slime:
    `--reward-key`."""

    rm_timeout: float = Field(10.0, gt=0)
    """Seconds of its own that a grader may spend on one sample, computing or waiting; then the sample is marked
    failed, or wrong where the grader is a built-in one. What a busy, paused or swapping machine keeps it waiting does
    not count. Several that are graded in one call have the sum."""

    rm_memory: int | None = Field(None, ge=2**26)
    """Bytes of data that a grader process may hold (`RLIMIT_DATA`, on Linux); a sample that needs more is marked
    failed. Null sets no limit: then a process that the machine ends for want of memory is tried again, and if that does
    not help the run ends."""

    rm_batch_size: int = Field(32, ge=1)
    """Samples that a grader of `samples` is given at once; with `group_rm` it is given a group."""

    rm_concurrency: int = Field(64, ge=1)
    """Calls of a grader that is a coroutine function that are under way at a time, in each process; and requests, of
    `remote_rm` and `judge`."""

    num_workers: int = Field(1, ge=1)
    """Grader processes."""

    rm_url: Location | None = None
    """Where `rm_type: remote_rm` posts `{prompt, response, label}` as JSON; the reply is a number, or a mapping with it
    under `reward_key`. slime: `--rm-url`."""

    rm_api_key_env: str | None = Field(None, pattern=ENVIRONMENT_NAME)
    """Name of the environment variable that holds the key of that service; the key itself is recorded nowhere."""

    judge: JudgeConfig | None = None
    """The language model of `rm_type: judge`."""

    reward_model: RewardModelConfig | None = None
    """The classifier of `rm_type: reward_model`."""

    code: CodeConfig | None = None
    """The sandbox of `rm_type: code`; `{}` takes it as it is by default."""

    cache: bool | None = None
    """Keep answers in the store by their content, so that none is paid for twice, whatever is retried, resumed, forked
    or graded again. By default those of `remote_rm`, of `judge`, and of graders that declare
    `cairn.plugin(cached=True)`."""

    overlong_buffer_len: int | None = Field(None, ge=1)
    """Tokens below `rollout.rollout_max_response_len` over which the reward of a longer response falls, see
    docs/rewards.md; null: length costs nothing. verl: `overlong_buffer.len`."""

    overlong_penalty_factor: float = Field(1.0, gt=0)
    """What a response of the longest length loses. verl: `overlong_buffer.penalty_factor`."""

    @model_validator(mode="after")
    def _has_effect(self) -> "RewardConfig":
        if self.overlong_buffer_len is None and self.overlong_penalty_factor != 1.0:
            raise ValueError(
                f"overlong_penalty_factor is {self.overlong_penalty_factor:g}, which has no effect: set "
                "overlong_buffer_len to the tokens over which it grows, or leave it out"
            )
        return self

    def of(self, rm_type: str | None) -> "RewardConfig":
        """With this grader of ours for all samples, as of a benchmark that names one; None leaves it as it is."""
        if rm_type is None:
            return self
        named = {"rm_type": rm_type, "rm_type_key": None, "custom_rm_path": None, "group_rm": False}
        return self.model_copy(update=named)
