"""Keep the groups whose rewards differ: in all others every group-relative advantage is zero (DAPO, Yu et al. 2025,
section 3.2: dynamic sampling)."""

import numpy as np

from cairn.tasks.selecting.filters.sample import FilterDecision

MIN_STD = 1e-6
"""Minimum standard deviation of the rewards, as in slime."""


def keep(rewards: np.ndarray) -> FilterDecision:
    """Keep a group whose rewards, [G], have an unbiased standard deviation above 1e-6; a single sample has none."""
    if len(rewards) > 1 and np.std(rewards, ddof=1) > MIN_STD:
        return FilterDecision(keep=True)
    return FilterDecision(keep=False, reason=f"zero_std_{round(float(rewards[0]), 1)}")
