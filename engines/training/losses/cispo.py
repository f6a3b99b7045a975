"""Clipped importance sampling policy optimization (MiniMax 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently
with Lightning Attention", equations 4 and 5).

With r_t = π(y_t) / π_old(y_t), whose logarithm is clamped by `bounded`, and sg the stop-gradient:

    L_t = -sg(clip(r_t, 1 - eps_clip, 1 + eps_clip_high)) A_t log π(y_t)

No token loses its gradient through clipping. In PPO the rare tokens that redirect a chain of thought would. The paper
sets no lower bound, which is `eps_clip` = 1, and a wide upper bound, without stating its value. Khatri et al. 2025,
"The Art of Scaling Reinforcement Learning Compute for LLMs", limit the ratio to 5, which is `eps_clip_high` = 4. These
two are the defaults. The paper averages over all tokens, which is `calculate_per_token_loss`.
"""

import torch

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens, require_field
from cairn.engines.training.limits import bounded
from cairn.engines.training.protocol import TokenLosses


@plugin(
    needs={"advantages", "old_log_probs"},
    reads={"eps_clip", "eps_clip_high"},
    defaults={"eps_clip": 1.0, "eps_clip_high": 4.0},
)
def loss(log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig) -> TokenLosses:
    """Return [T] losses and metrics; `ppo_kl` measures how far the policy has moved."""
    ppo_kl = (require_field(tokens.old_log_probs) - log_probs).detach()
    ratio = torch.exp(bounded(-ppo_kl))
    clipped = ratio.clamp(1 - config.eps_clip, 1 + config.upper_clip_range)
    return -clipped * require_field(tokens.advantages) * log_probs, {
        "pg_clipfrac": (clipped != ratio).float(),
        "ppo_kl": ppo_kl,
    }
