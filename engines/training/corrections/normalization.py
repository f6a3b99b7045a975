"""The mean of the weights of an optimizer step, by which they are divided with `tis_batch_normalize`.

The weights follow from the log-probs of the old policy and of the rollout engine alone, which every rank has of all
samples before anything is cut: so the mean is taken on each of them, over the whole step, and is the same number on all
of them however the step is then cut into micro-batches and spread over ranks.
"""

from collections.abc import Sequence

import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.aggregations import NO_WEIGHT
from cairn.engines.training.collate import collate_trained
from cairn.engines.training.losses.objective import correction_weights
from cairn.engines.types import TrainBatch


def mean_weight(batch: TrainBatch, sequences: Sequence[int], algorithm: AlgorithmConfig) -> float:
    """Over the tokens of some sequences, or where the weights are those of whole responses over the sequences; those of
    weight 0 do not count, and 1 where there are no others.

    Args:
        sequences: those of the optimizer step that have a trained token.
    """
    tokens = collate_trained(batch, sequences, [NO_WEIGHT] * len(sequences), torch.device("cpu"))
    weights, _ = correction_weights(tokens, algorithm)
    counted = (weights != 0).float()
    if algorithm.tis_level != "token":
        weights, counted = tokens.sums(weights), tokens.sums(counted)
        weights, counted = weights / counted.clamp(min=1), (counted > 0).float()
    total = float(counted.sum())
    return float(weights.double().sum()) / total if total else 1.0
