"""Advantages of one scale, whatever the scale of rewards."""

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-8
"""Added to the variance, as in slime."""


def normalise(advantages: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(A - mean) / sqrt(variance + 1e-8), mean and unbiased variance over the trained tokens of all samples; 0 at all
    other tokens.

    Args:
        advantages: [T_i] float32 of each sample.
        loss_masks: [T_i], 1 at trained tokens.
    """
    masks = [mask.astype(bool) for mask in loss_masks]
    trained = np.concatenate([a[mask] for a, mask in zip(advantages, masks, strict=True)]).astype(np.float64)
    # As for the rewards of a group: equal numbers must not be blown up by the rounding error of their mean.
    if not trained.size or np.ptp(trained) == 0:
        return [np.zeros_like(a) for a in advantages]
    mean, scale = trained.mean(), 1 / np.sqrt(trained.var(ddof=1) + EPSILON)
    return [np.where(mask, (a - mean) * scale, 0).astype(np.float32) for a, mask in zip(advantages, masks, strict=True)]
