"""Aggregation of token losses by a mean.

With N samples, l_it the loss of trained token t of sample i, and c_i the tokens of sample i that were sampled for
training. An age bound or a filter may take some of these tokens out of the sums; c_i still counts them, so the
remaining tokens keep their weights.

| option | loss of the batch |
|---|---|
| | 1/N Σ_i 1/c_i Σ_t l_it: the mean over samples of the mean over a sample's tokens |
| `calculate_per_token_loss` | Σ_i Σ_t l_it / Σ_i c_i: the mean over all tokens |
| `loss_scale_factor` C | 1/N Σ_i 1/C Σ_t l_it: the mean over samples of the sum over their tokens, by a constant |

In the first form, a token of a long response weighs less than one of a short response. Among wrong answers, the long
ones are therefore punished less. Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.1) removes
this length bias with the third form.
"""

from collections.abc import Sequence

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig


@plugin(reads={"calculate_per_token_loss", "loss_scale_factor"})
def weigh(counts: Sequence[int], config: AlgorithmConfig) -> list[float]:
    """Return the weight of each trained token of each sample, from the counts c_i.

    A sample with a count of 0 counts as one with loss 0.
    """
    samples = len(counts)
    if config.calculate_per_token_loss:
        return [1 / sum(counts)] * samples
    if config.loss_scale_factor is None:
        return [1 / (samples * max(count, 1)) for count in counts]
    return [1 / (samples * config.loss_scale_factor)] * samples
