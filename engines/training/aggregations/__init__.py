"""Aggregation of token losses into the loss of a batch.

Each file holds one aggregation, `weigh(counts, config)`. The batch's loss is the sum over its tokens, each weighted by
the weight of its sample. The weights are known before the batch is cut into micro-batches or spread over ranks, so the
sum does not depend on how that is done.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cairn.configs.kinds import AGGREGATION
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig


class Weight(NamedTuple):
    """Weights of each trained token of a sample."""

    loss: float
    """Weight in the policy's loss."""
    value: float
    """Weight in the critic's loss, which is always a mean, whatever divides the policy's loss."""
    share: float
    """Weight in metrics, which are means over the trained tokens."""


NO_WEIGHT = Weight(0.0, 0.0, 0.0)
"""Weight of samples that do not count."""


def token_weights(
    trained: Sequence[int], algorithm: AlgorithmConfig, divisors: Sequence[int] | None = None
) -> list[Weight]:
    """Return the weight of each trained token of each sample.

    The loss weight comes from `custom_pg_loss_reducer_function_path`. Raises BadPlugin where that function does not
    return one finite number per sample.

    Args:
        trained: trained tokens of every sample of the optimizer step, over all ranks; at least one is positive.
        divisors: tokens per sample that count in the divisor of the losses, at least as many as the trained ones; None:
            the trained ones.
    """
    name, samples = algorithm.custom_pg_loss_reducer_function_path, len(trained)
    counts = list(trained if divisors is None else divisors)
    returned = AGGREGATION.load(name)(counts, algorithm)
    try:
        losses = [float(weight) for weight in returned]
        fits = len(losses) == samples and all(map(math.isfinite, losses))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise BadPlugin(
            f"the aggregation {name!r} returned something else than a number for each of the {samples} samples: "
            "correct it"
        )
    if algorithm.calculate_per_token_loss:
        return [Weight(loss, 1 / sum(counts), 1 / sum(trained)) for loss in losses]

    def means(tokens: Sequence[int]) -> list[float]:
        return [1 / (samples * max(count, 1)) for count in tokens]

    return [Weight(*weights) for weights in zip(losses, means(counts), means(trained), strict=True)]


def sequence_weights(
    trained: Sequence[int],
    samples: Sequence[int],
    algorithm: AlgorithmConfig,
    divisors: Sequence[int] | None = None,
) -> list[Weight]:
    """Return the weight of each trained token of each sequence.

    The weight is that of the sequence's sample. A sample counts once, with the tokens of all its sequences.

    Args:
        trained: trained tokens of every sequence of the optimizer step, over all ranks; at least one is positive.
        samples: the sample that each sequence belongs to.
        divisors: as in `token_weights`, per sequence.
    """
    counts, sample_divisors = Counter[int](), Counter[int]()
    for sample, own, divisor in zip(samples, trained, trained if divisors is None else divisors, strict=True):
        counts[sample] += own
        sample_divisors[sample] += divisor
    by_sample = token_weights(list(counts.values()), algorithm, list(sample_divisors.values()))
    weights = dict(zip(counts, by_sample, strict=True))
    return [weights[sample] for sample in samples]
