"""How shares of metrics become one: those named `…_max` by the largest, all others by their sum or mean."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import distributed

LARGEST = "_max"
"""Ends the names of metrics of which the largest share counts."""


def merge(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The shares of one optimizer step's metrics in its micro-batches or ranks, as one; a name may lack in some."""
    merged: dict[str, float] = {}
    for share in shares:
        for name, value in share.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = max(merged[name], value) if name.endswith(LARGEST) else merged[name] + value
    return merged


def merge_over_ranks(share: Mapping[str, float], world_size: int) -> dict[str, float]:
    """Every rank's share as one, the same on all ranks; called on all of them."""
    shares: list[Mapping[str, float]] = [share] * world_size
    if world_size > 1:
        distributed.all_gather_object(shares, share)
    return merge(shares)


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several optimizer steps as one: their means, of the largest the largest."""
    merged = merge(steps)
    return {name: value if name.endswith(LARGEST) else value / len(steps) for name, value in merged.items()}


def numbers(metrics: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Scalars as numbers, all of them fetched from their device at once."""
    if not metrics:
        return {}
    return dict(zip(metrics, torch.stack([value.double() for value in metrics.values()]).tolist(), strict=True))
