"""Keep the groups whose rewards differ, like `check_reward_nonzero_std`, and fill missing places with others once the
rounds of rollout are used up."""

from dataclasses import replace

import numpy as np

from cairn.tasks.selecting.filters import check_reward_nonzero_std
from cairn.tasks.selecting.filters.sample import FilterDecision


def keep(rewards: np.ndarray) -> FilterDecision:
    """Return the decision on a group with these rewards, [G]."""
    return replace(check_reward_nonzero_std.keep(rewards), keep_when_insufficient=True)
