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
    value: float
    """In the critic's loss, which is a mean whatever the policy's is divided by."""
    share: float
    """In metrics, which are means over the trained tokens."""


NO_WEIGHT = Weight(0.0, 0.0, 0.0)
"""Of what does not count."""


def token_weights(
    trained: Sequence[int], algorithm: AlgorithmConfig, divisors: Sequence[int] | None = None
) -> list[Weight]:
    """The weight of each trained token of each sample, in the loss by `custom_pg_loss_reducer_function_path`. Raises
    BadPlugin where that returns anything else.

    Args:
        trained: trained tokens of every sample of the optimizer step, over all ranks; at least one is positive.
        divisors: tokens that count in what the losses are divided by, as many or more; None: the trained ones.
    """
    name, samples = algorithm.custom_pg_loss_reducer_function_path, len(trained)
    counts = list(trained if divisors is None else divisors)
    found = AGGREGATION.load(name)(counts, algorithm)
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
    """The weight of each trained token of each sequence: its sample's, which counts once and has the tokens of all its
    sequences.

    Args:
        trained: trained tokens of every sequence of the optimizer step, over all ranks; at least one is positive.
        samples: which sample each is of.
        divisors: see `token_weights`.
    """
    counts, held = Counter[int](), Counter[int]()
    for sample, own, divisor in zip(samples, trained, trained if divisors is None else divisors, strict=True):
        counts[sample] += own
        held[sample] += divisor
    found = token_weights(list(counts.values()), algorithm, list(held.values()))
    weights = dict(zip(counts, found, strict=True))
    return [weights[sample] for sample in samples]
