"""Divergence proximal policy optimization, limited by total variation (Qi et al. 2026, "Rethinking the Trust Region in
LLM Reinforcement Learning", its binary approximation; `dppo_tv` in verl).

With μ the behaviour policy, which sampled the tokens, r_t = π(y_t) / μ(y_t), and sg the stop-gradient:

    L_t = -M_t sg(min(r_t, 20)) A_t log π(y_t)

M_t is 0, and the token has no gradient, where the update would lead away from μ and π is already further from it than a
threshold: |π(y_t) - μ(y_t)| > eps_clip_high where A_t > 0 and r_t > 1, > eps_clip where A_t < 0 and r_t < 1. The
distance is that of the two-valued distributions of "this token" and "another one". A clipped ratio lets a probable
token move far and a rare one hardly at all; this mask does the opposite.

The paper's threshold, 0.15, is the default, and 20 is the paper's bound of the weight. The ratio to μ corrects both for
the lag of the weights and for the differences between the two engines, so no other correction is needed.
"""

from collections.abc import Callable

import torch

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens, require_field
from cairn.engines.training.limits import bounded
from cairn.engines.training.protocol import TokenLosses

LARGEST_WEIGHT = 20.0

Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""([T] log-probs of the policy, [T] of the behaviour policy) → [T] ≥ 0."""


@plugin(needs={"advantages", "rollout_log_probs"}, reads={"eps_clip", "eps_clip_high"}, defaults={"eps_clip": 0.15})
def loss(log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig) -> TokenLosses:
    """Return [T] losses and metrics.

    `pg_clipfrac` is the share of masked tokens, and `ppo_kl` measures how far the policy is from the behaviour policy.
    """
    return within_a_divergence(log_probs, tokens, config, total_variation)


def within_a_divergence(
    log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig, divergence: Divergence
) -> TokenLosses:
    """Return the [T] losses above, with another divergence in place of |π - μ|, and their metrics."""
    advantages, current = require_field(tokens.advantages), log_probs.detach()
    moved = current - tokens.behaviour
    apart = divergence(current, tokens.behaviour)
    too_high = (advantages > 0) & (moved > 0) & (apart > config.upper_clip_range)
    too_low = (advantages < 0) & (moved < 0) & (apart > config.eps_clip)
    left_out = (too_high | too_low).float()
    weights = torch.exp(bounded(moved)).clamp(max=LARGEST_WEIGHT) * (1 - left_out)
    return -weights * advantages * log_probs, {"pg_clipfrac": left_out, "ppo_kl": -moved}


def total_variation(log_probs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """Return [T] |π(y_t) - μ(y_t)|, from log-probs."""
    return (log_probs.exp() - behaviour.exp()).abs()
