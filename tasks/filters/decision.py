"""What a filter says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FilterDecision:
    """What is to become of a group. slime: `DynamicFilterOutput`."""

    keep: bool
    reason: str | None = None
    """Why it is dropped: counted under `dynamic_filter/drop_<reason>`."""
    keep_when_insufficient: bool = False
    """A dropped group that is still better than none, once the rounds of rollout are used up."""
    priority: float | None = None
    """What the buffer policy `priority` puts a kept group by, the highest first."""


Filter = Callable[[Any], FilterDecision]
"""`filter(rewards)`: the rewards, [G] float64, are those of one group, none of them failed; or `filter(samples)`: a
list of its `cairn.GradedSample`. A pure function: its answer is recorded once and never asked for again."""
