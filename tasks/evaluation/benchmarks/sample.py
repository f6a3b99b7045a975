"""What a benchmark's metric is given of a sample."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EvaluatedSample:
    """One graded response to a question of a benchmark."""

    question: int
    """Row of the benchmark, from 0."""
    index: int
    """Which of the `n_samples_per_eval_prompt` responses to it."""
    reward: float | None
    """None where it could not be generated or graded."""
    components: dict[str, Any] | None = None
    """What else the grader said."""
    error: str | None = None
    """Why it has no reward."""
    response: str = ""
    """As text, without special tokens."""
    length: int = 0
    """Tokens of the response."""
    truncated: bool = False
    """Whether the response was cut at the longest length allowed."""
    label: str | None = None
    """The expected answer."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Of the data row."""
