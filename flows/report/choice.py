"""Which samples of a long run are shown with their tokens."""

from enum import IntEnum

import numpy as np

_SHARE = 0.1


class Why(IntEnum):
    """Why a sample was chosen; a sample of several kinds has the first."""

    NONE = 0
    """It was not."""
    ALL = 1
    """All were: they are few."""
    BEST = 2
    """One of the highest rewards."""
    WORST = 3
    """One of the lowest rewards, or failed."""
    MEDIAN = 4
    """Its reward is in the middle."""
    SPREAD = 5
    """Drawn at random, so that every iteration has about as many."""


def choose(iterations: np.ndarray, rewards: np.ndarray, most: int, seed: int) -> np.ndarray:
    """A `Why` for every sample, of which at most `most` are not NONE: a tenth of those the best, the worst and the
    median ones each, the others drawn from all iterations alike. Equal for equal arguments.

    Args:
        rewards: NaN where a sample has none.
    """
    n = len(rewards)
    if n <= most:
        return np.full(n, Why.ALL, np.uint8)
    chance = np.random.default_rng(seed)
    why = np.full(n, Why.NONE, np.uint8)
    each = int(most * _SHARE)
    shuffled = chance.permutation(n)  # of equal rewards, any
    known = shuffled[np.isfinite(rewards[shuffled])]
    ascending = known[np.argsort(rewards[known], kind="stable")]
    failed = shuffled[~np.isfinite(rewards[shuffled])]
    middle = max(0, len(ascending) // 2 - each // 2)
    why[ascending[middle : middle + each]] = Why.MEDIAN
    why[np.concatenate([failed[: each // 2], ascending])[:each]] = Why.WORST
    why[ascending[max(0, len(ascending) - each) :]] = Why.BEST
    left = most - int((why != Why.NONE).sum())
    others = shuffled[why[shuffled] == Why.NONE]
    # The nth of every iteration before the n + 1st of any.
    by_iteration = others[np.argsort(iterations[others], kind="stable")]
    _, firsts, counts = np.unique(iterations[by_iteration], return_index=True, return_counts=True)
    turns = np.arange(len(by_iteration)) - np.repeat(firsts, counts)
    ties = chance.permutation(len(by_iteration))
    why[by_iteration[np.lexsort((ties, turns))[:left]]] = Why.SPREAD
    return why
