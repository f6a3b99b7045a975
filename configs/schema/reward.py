"""How samples are graded."""

from pydantic import Field

from configs.schema.base import Section


class RewardConfig(Section):
    """The grader and its limits."""

    rm_type: str = "math"
    """Built-in grader: `math` (math-verify), `exact_match` or `random`. slime: `--rm-type`."""

    custom_rm_path: str | None = None
    """Grader of your own, by import path (`package.module.function`) or file (`rewards.py:function`); it takes
    precedence over `rm_type`. slime: `--custom-rm-path`."""

    rm_timeout: float = Field(10.0, gt=0)
    """Seconds that grading one sample may take; then the sample is marked failed."""

    num_workers: int = Field(1, ge=1)
    """Grader processes."""
