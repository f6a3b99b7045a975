"""How far the experts of the rollout are from those that the trained model would choose."""

from collections.abc import Iterable

from cairn.engines.types import TrainBatch

MISMATCH = "routing_mismatch"
"""Metric: the share of the rollout's choices, of an expert by a mixture for a token, that the router of the model that
is trained would not have made where they were given to it."""


def routed_choices(batch: TrainBatch, samples: Iterable[int]) -> int:
    """How many choices the rollout gives for some samples of a batch."""
    routed = batch.routed_experts or [None] * len(batch)
    return sum(experts.size for sample in samples if (experts := routed[sample]) is not None)
