"""Bounds within which a loss and its gradient stay finite in float32."""

import torch

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are held within ± this before they are exponentiated, as in verl and in slime's mismatch helpers: e^20 is
5e8, far beyond what any clip range lets through, and float32 overflows at e^88.7."""


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Log-ratios within the bounds; those beyond have no gradient, and what is no number stays none."""
    held = log_ratio.detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return torch.where(log_ratio.abs() > LARGEST_LOG_RATIO, held, log_ratio)
