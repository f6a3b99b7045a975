"""Bounds within which a loss and its gradient stay finite in float32."""

import torch

LARGEST_LOG_RATIO = 20.0
"""Bound of the absolute log-ratio before it is exponentiated, as in verl and in slime's mismatch helpers: e^20 is 5e8,
far beyond any clip range, and float32 overflows at e^88.7."""


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return log-ratios clamped to the bounds; those beyond have no gradient, and NaN stays NaN."""
    clamped = log_ratio.detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return torch.where(log_ratio.abs() > LARGEST_LOG_RATIO, clamped, log_ratio)
