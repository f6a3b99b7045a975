"""Advantages of one scale, whatever the scale of rewards."""

from collections.abc import Sequence

import numpy as np

from cairn.tasks.advantages.tokens import TrainedTokens

EPSILON = 1e-8
"""Added to the variance, as in slime."""


def normalise(advantages: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(A - mean) / sqrt(variance + 1e-8), mean and unbiased variance over the trained tokens of all samples; 0 at all
    other tokens.

    Args:
        advantages: [T_i] float32 of each sample.
        loss_masks: [T_i], 1 at trained tokens.
    """
    tokens = TrainedTokens(loss_masks)
    trained = tokens.of(advantages)
    # As for the rewards of a group: equal numbers, and one alone, must not be blown up by a rounding error.
    if not trained.size or np.ptp(trained) == 0:
        return tokens.spread(np.zeros_like(trained))
    mean, scale = trained.mean(), 1 / np.sqrt(trained.var(ddof=1) + EPSILON)
    return tokens.spread((trained - mean) * scale)
