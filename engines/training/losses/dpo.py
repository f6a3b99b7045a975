"""Direct preference optimization, of which the estimator of that name has made advantages and returns
(`cairn.tasks.advantages.dpo`).

With A the advantage and L the return of a sample's c trained tokens, every token's loss is

    l_t = L - 2 c A (log π(y_t) - sg(log π(y_t)))

so that the mean over samples of the mean over their tokens is that of L over pairs, and its gradient that of the mean
of -A Σ_t log π(y_t) over pairs: both those of the loss of the paper at the policy that A and L were made from.
"""

import torch

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens, given
from cairn.engines.training.protocol import TokenLosses


@plugin(needs={"advantages", "returns"})
def loss(log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig) -> TokenLosses:
    """[T]."""
    weights = 2 * tokens.of_tokens(tokens.counts) * given(tokens.advantages)
    return given(tokens.returns) - weights * (log_probs - log_probs.detach()), {}
