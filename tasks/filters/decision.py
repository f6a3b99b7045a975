"""What a filter says."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FilterDecision:
    """What is to become of a group. slime: `DynamicFilterOutput`."""

    keep: bool
    reason: str | None = None
    """Why it is dropped: counted under `dynamic_filter/drop_<reason>`."""
    keep_when_insufficient: bool = False
    """A dropped group that is still better than none, once the rounds of rollout are used up."""


Filter = Callable[[np.ndarray], FilterDecision]
"""`filter(rewards)`: the rewards, [G] float64, are those of one group, none of them failed. A pure function: its answer
is recorded once and never asked for again."""
