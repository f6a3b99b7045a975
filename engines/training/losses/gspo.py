"""Group sequence policy optimization (Zheng et al. 2025, "Group Sequence Policy Optimization", equations 5 to 7).

With y_i a response, all of whose tokens have the advantage A_i:

    s_i = exp(1/|y_i| Σ_t (log π(y_it) - log π_old(y_it)))
    L_i = -min(s_i A_i, clip(s_i, 1 - eps_clip, 1 + eps_clip_high) A_i)

Every token of the response has the loss L_i, so the mean over samples is the paper's. Each token is differentiated
through its own log-prob alone, like GSPO-token (equations 13 and 14: s_it = sg(s_i) π(y_it) / sg(π(y_it))). With equal
advantages within a response, the sum has the same gradient, s_i A_i 1/|y_i| Σ_t ∇ log π(y_it). With different
advantages, for example where tokens are charged for a divergence, every token follows its own.

The ratios of whole responses stay near 1: the paper's clip ranges, 3e-4 and 4e-4, are the defaults.
"""

import torch

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens, require_field
from cairn.engines.training.losses.policy_loss import policy_loss
from cairn.engines.training.protocol import TokenLosses


@plugin(
    needs={"advantages", "old_log_probs"},
    reads={"eps_clip", "eps_clip_high", "eps_clip_c"},
    defaults={"eps_clip": 3e-4, "eps_clip_high": 4e-4},
)
def loss(log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig) -> TokenLosses:
    """Return [T] losses and metrics; `ppo_kl` measures how far the policy has moved, as the mean over the response."""
    current = log_probs.detach()
    moved = tokens.of_tokens(tokens.means(require_field(tokens.old_log_probs) - current))
    ppo_kl = moved - (log_probs - current)  # the response's value, the token's gradient
    losses, clipped = policy_loss(
        ppo_kl,
        require_field(tokens.advantages),
        eps_clip=config.eps_clip,
        eps_clip_high=config.eps_clip_high,
        eps_clip_c=config.eps_clip_c,
    )
    return losses, {"pg_clipfrac": clipped, "ppo_kl": ppo_kl}
