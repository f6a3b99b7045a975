"""What a loss is.

It gives every trained token a loss of its own, from which `cairn.engines.training.aggregations` makes that of the
batch, the same however samples are packed, cut into micro-batches and spread over ranks. Where it looks at the tokens
of a sample together, such as for the ratio of a whole response, it asks `tokens` for sums and means over samples: those
are exact and differentiable also where context parallelism leaves this process only a part of a sample.

The bonus for entropy, the divergences from the reference model and from a teacher and the correction of off-policy
tokens are options of their own, which come on top of any loss that reads advantages.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import distributed

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens

# Bounds within which a loss and its gradient stay finite in float32.


LARGEST_LOG_RATIO = 20.0
"""Log-ratios are held within ± this before they are exponentiated, as in verl and in slime's mismatch helpers: e^20 is
5e8, far beyond what any clip range lets through, and float32 overflows at e^88.7."""


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Log-ratios within the bounds; those beyond have no gradient, and what is no number stays none."""
    held = log_ratio.detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return torch.where(log_ratio.abs() > LARGEST_LOG_RATIO, held, log_ratio)


# How shares of metrics become one: those named `…_max` by the largest, all others by their sum or mean.


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


TokenLosses = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""The loss of each of T tokens; and metrics, also [T], whose means over the batch are recorded by their names."""


class Loss(Protocol):
    """From log-probs to the loss of each token."""

    def __call__(self, log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig, /) -> TokenLosses:
        """All ranks that hold parts of the same samples call it together, each with its own tokens, perhaps none: it
        must ask `tokens` for the same sums on all of them.

        Args:
            log_probs: [T] of the trained tokens, to be differentiated.
            tokens: the same tokens: what is known of them, and of the samples that they are of. Of what is not always
                there it holds what the loss needs (`cairn.plugin`).
        """
