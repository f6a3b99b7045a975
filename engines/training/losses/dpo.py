"""Direct preference optimization. The estimator of that name provides advantages and returns
(`cairn.tasks.advantages.dpo`).

With A the advantage and L the return of a sample's c trained tokens, every token's loss is

    l_t = L - 2 c A (log π(y_t) - sg(log π(y_t)))

so that the mean over samples of the mean over their tokens is the mean of L over pairs. Its gradient is that of the
mean of -A Σ_t log π(y_t) over pairs. Both equal those of the paper's loss at the policy that A and L were computed
from.
"""

import torch

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens, require_field
from cairn.engines.training.protocol import TokenLosses


@plugin(needs={"advantages", "returns"})
def loss(log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig) -> TokenLosses:
    """Return [T] losses."""
    weights = 2 * tokens.of_tokens(tokens.counts) * require_field(tokens.advantages)
    return require_field(tokens.returns) - weights * (log_probs - log_probs.detach()), {}
