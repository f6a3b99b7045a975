"""What became of the prompts of a round, as a curriculum or a data source with a state learns it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GroupResult:
    """A group that was judged: its prompt, and how the policy did."""

    group_id: int
    prompt_index: int
    """The prompt's place in the data; of a source with a state, which prompt of its own it was, from 0."""
    label: str | None
    metadata: dict[str, Any]
    """Of the prompt's row."""
    mean_reward: float | None
    """Of the group's samples; None where a sample failed."""
    std_reward: float | None
    kept: bool
    """Whether it was kept by the filter; it may be trained on later, from the buffer."""
    reason: str | None
    """Why not."""
    pass_rate: float | None = None
    """Share of the group's answers that are right, by its mean reward and what its grader pays; None where a sample
    failed. Rewards of graders of one's own count as shares."""
