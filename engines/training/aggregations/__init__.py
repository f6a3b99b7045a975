"""How the losses of tokens become that of a batch. One aggregation a file, `weigh(counts, config)`: the batch's loss is
the sum over its tokens, each with the weight of its sample.

The weights are known before anything is cut into micro-batches or spread over ranks, so the sum is the same however
that is done.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cairn.configs.kinds import AGGREGATION
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig


class Weight(NamedTuple):
    """Of each trained token of a sample."""

    loss: float
    """In the loss of the policy."""
    mean: float
    """In its metrics and the critic's loss, which are means whatever the loss is divided by."""


NO_WEIGHT = Weight(0.0, 0.0)
"""Of what does not count."""


def token_weights(mask_sums: Sequence[int], algorithm: AlgorithmConfig) -> list[Weight]:
    """The weight of each trained token of each sample, in the loss by `custom_pg_loss_reducer_function_path`. Raises
    BadPlugin where that returns anything else.

    Args:
        mask_sums: trained tokens of every sample of the optimizer step, over all ranks; at least one is positive.
    """
    name, samples = algorithm.custom_pg_loss_reducer_function_path, len(mask_sums)
    found = AGGREGATION.load(name)(list(mask_sums), algorithm)
    try:
        losses = [float(weight) for weight in found]
        fits = len(losses) == samples and all(map(math.isfinite, losses))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise BadPlugin(
            f"the aggregation {name!r} returned something else than a number for each of the {samples} samples: "
            "correct it"
        )
    if algorithm.calculate_per_token_loss:
        return [Weight(loss, 1 / sum(mask_sums)) for loss in losses]
    return [Weight(loss, 1 / (samples * max(count, 1))) for loss, count in zip(losses, mask_sums, strict=True)]


def sequence_weights(mask_sums: Sequence[int], samples: Sequence[int], algorithm: AlgorithmConfig) -> list[Weight]:
    """The weight of each trained token of each sequence: its sample's, which counts once and has the tokens of all its
    sequences.

    Args:
        mask_sums: trained tokens of every sequence of the optimizer step, over all ranks; at least one is positive.
        samples: which sample each is of.
    """
    counts = Counter[int]()
    for sample, trained in zip(samples, mask_sums, strict=True):
        counts[sample] += trained
    weights = dict(zip(counts, token_weights(list(counts.values()), algorithm), strict=True))
    return [weights[sample] for sample in samples]
