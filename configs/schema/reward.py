"""How samples are graded."""

from pydantic import Field

from cairn.configs.schema.base import Section


class RewardConfig(Section):
    """The grader and its limits."""

    rm_type: str = "math"
    """Built-in grader: `math` (math-verify), `exact_match`, `random`, or one of a benchmark, such as `gsm8k`; see
    docs/rewards.md for the answer that counts. slime: `--rm-type`."""

    custom_rm_path: str | None = None
    """Grader of your own, by import path (`package.module.function`) or file (`rewards.py:function`); it takes
    precedence over `rm_type`. slime: `--custom-rm-path`."""

    rm_timeout: float = Field(10.0, gt=0)
    """Seconds of its own that a grader may spend on one sample, computing or waiting; then the sample is marked
    failed. What a busy, paused or swapping machine keeps it waiting does not count."""

    rm_memory: int | None = Field(None, ge=2**26)
    """Bytes of data that a grader process may hold (`RLIMIT_DATA`, on Linux); a sample that needs more is marked
    failed. Null sets no limit: then a process that the machine ends for want of memory is tried again, and if that does
    not help the run ends."""

    num_workers: int = Field(1, ge=1)
    """Grader processes."""
