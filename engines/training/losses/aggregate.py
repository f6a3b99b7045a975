"""How the losses of tokens become the loss of a batch.

With N samples, c_i trained tokens of sample i and l_it the loss of one of them:

| option | loss of the batch |
|---|---|
| | 1/N Σ_i 1/c_i Σ_t l_it: the mean over samples of the mean over a sample's tokens |
| `calculate_per_token_loss` | Σ_i Σ_t l_it / Σ_i c_i: the mean over all tokens |
| `loss_scale_factor` C | 1/N Σ_i 1/C Σ_t l_it: the mean over samples of the sum over their tokens, by a constant |

In the first, a token of a long response counts for less than one of a short one, so that among wrong answers the long
ones are punished less: the length bias that Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training", section
3.1) takes away by the third.
"""

from collections.abc import Sequence
from typing import NamedTuple

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
    """The weight of each trained token of each sample, such that the batch's loss is the weighted sum over its tokens.

    The weights are known before anything is cut into micro-batches or spread over ranks, so the sum is the same however
    that is done. A sample without trained tokens counts as one whose loss is 0.

    Args:
        mask_sums: trained tokens of every sample of the optimizer step, over all ranks; at least one is positive.
    """
    samples = len(mask_sums)
    if algorithm.calculate_per_token_loss:
        return [Weight(1 / sum(mask_sums), 1 / sum(mask_sums))] * samples
    means = [1 / (samples * max(count, 1)) for count in mask_sums]
    if algorithm.loss_scale_factor is None:
        return [Weight(mean, mean) for mean in means]
    return [Weight(1 / (samples * algorithm.loss_scale_factor), mean) for mean in means]
