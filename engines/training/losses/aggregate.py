"""How the losses of tokens become the loss of a batch.

With N samples, c_i trained tokens of sample i and l_it the loss of one of them:

| option | loss of the batch |
|---|---|
| | 1/N Σ_i 1/c_i Σ_t l_it: the mean over samples of the mean over a sample's tokens |
| `calculate_per_token_loss` | Σ_i Σ_t l_it / Σ_i c_i: the mean over all tokens |
| `loss_scale_factor` C | 1/N Σ_i 1/C Σ_t l_it: the mean over samples of the sum over their tokens, by a constant |
| `custom_pg_loss_reducer_function_path` | Σ_i w_i Σ_t l_it, with weights w_i of one's own |

In the first, a token of a long response counts for less than one of a short one, so that among wrong answers the long
ones are punished less: the length bias that Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training", section
3.1) takes away by the third.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from cairn.configs.kinds import AGGREGATION
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.losses.aggregations import sample_mean, token_mean


class Weight(NamedTuple):
    """Of each trained token of a sample."""

    loss: float
    """In the loss of the policy."""
    mean: float
    """In its metrics and the critic's loss, which are means whatever the loss is divided by."""


NO_WEIGHT = Weight(0.0, 0.0)
"""Of what does not count."""


def token_weights(
    mask_sums: Sequence[int], algorithm: AlgorithmConfig, groups: Sequence[int] | None = None
) -> list[Weight]:
    """The weight of each trained token of each sample, such that the batch's loss is the weighted sum over its tokens.

    Args:
        mask_sums: trained tokens of every sample of the optimizer step, over all ranks; at least one is positive.
        groups: of every sample; None where each is one by itself.

    Raises:
        BadPlugin: the aggregation returns anything but a number for each sample.
    """
    groups = range(len(mask_sums)) if groups is None else groups
    name = algorithm.aggregation
    weights = list(AGGREGATION.load(name)(mask_sums, groups, algorithm))
    if len(weights) != len(mask_sums) or not all(math.isfinite(weight) for weight in weights):
        raise BadPlugin(
            f"the aggregation {name!r} returned {len(weights)} weights for {len(mask_sums)} samples, or some that are "
            "no numbers: let it return one for each"
        )
    mean = token_mean if algorithm.calculate_per_token_loss else sample_mean
    return [Weight(*pair) for pair in zip(weights, mean.weigh(mask_sums, groups, algorithm), strict=True)]
