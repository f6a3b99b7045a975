"""How the losses of tokens become the loss of a batch.

With N samples, l_it the loss of a trained token of sample i, and c_i its tokens that were sampled to be trained on, of
which an age bound or a filter may have taken some out of the sums (so that those that stay weigh what they did):

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

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig


@plugin(reads={"calculate_per_token_loss", "loss_scale_factor"})
def weigh(counts: Sequence[int], config: AlgorithmConfig) -> list[float]:
    """The weight of each trained token of each sample, by their c_i; one without any counts as one whose loss is 0."""
    samples = len(counts)
    if config.calculate_per_token_loss:
        return [1 / sum(counts)] * samples
    if config.loss_scale_factor is None:
        return [1 / (samples * max(count, 1)) for count in counts]
    return [1 / (samples * config.loss_scale_factor)] * samples
