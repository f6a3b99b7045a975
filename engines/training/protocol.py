"""Interface of a loss.

A loss returns a separate loss for every trained token. `cairn.engines.training.aggregations` makes the loss of the
batch from these, the same however samples are packed, cut into micro-batches and spread over ranks. A loss that needs
the tokens of a sample together, such as for the ratio of a whole response, calls `tokens` for sums and means over
samples. These are exact and differentiable even where context parallelism leaves this process only a part of a sample.

The entropy bonus, the divergences from the reference model and from a teacher, and the off-policy correction are
separate options. They are added to any loss that reads advantages.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens
from cairn.engines.training.process import gathered

# Merging of metrics: those named `…_max` by the largest share, all others by their sum or mean.


LARGEST = "_max"
"""Suffix of metrics that are merged by their largest share."""


def merge(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merge the shares of one optimizer step's metrics from its micro-batches or ranks; some may lack a name."""
    merged: dict[str, float] = {}
    for share in shares:
        for name, value in share.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = max(merged[name], value) if name.endswith(LARGEST) else merged[name] + value
    return merged


def merge_over_ranks(share: Mapping[str, float], world_size: int) -> dict[str, float]:
    """Merge the shares of all ranks. Called on all ranks; returns the same on each."""
    return merge(gathered(share, world_size))


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of several optimizer steps: by their mean, or by the largest for names in `…_max`."""
    merged = merge(steps)
    return {name: value if name.endswith(LARGEST) else value / len(steps) for name, value in merged.items()}


def numbers(metrics: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return scalars as numbers, fetched from their device all at once."""
    if not metrics:
        return {}
    return dict(zip(metrics, torch.stack([value.double() for value in metrics.values()]).tolist(), strict=True))


TokenLosses = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""Loss of each of T tokens; and metrics, also [T], whose means over the batch are recorded by their names."""


class Loss(Protocol):
    """Function from log-probs to the loss of each token."""

    def __call__(self, log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig, /) -> TokenLosses:
        """Return the losses and metrics of this rank's tokens.

        All ranks that hold parts of the same samples call the loss together, each with its own tokens, possibly none.
        The loss must request the same sums from `tokens` on all of them.

        Args:
            log_probs: [T] of the trained tokens, differentiable.
            tokens: the same tokens, with the data of them and of their samples. Of the optional fields it has those
                that the loss declares as its needs (`cairn.plugin`).
        """
