"""Sample as a benchmark's metric receives it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EvaluatedSample:
    """Graded response to a question of a benchmark."""

    question: int
    """Row of the benchmark, from 0."""
    index: int
    """Number of the response among the `n_samples_per_eval_prompt` ones to the question."""
    reward: float | None
    """Reward; None where the response could not be generated or graded."""
    components: dict[str, Any] | None = None
    """Other results of the grader."""
    error: str | None = None
    """Reason why it has no reward."""
    response: str = ""
    """Response as text, without special tokens."""
    length: int = 0
    """Tokens of the response."""
    truncated: bool = False
    """Whether the response was cut at the longest length allowed."""
    label: str | None = None
    """The expected answer."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata of the data row."""
