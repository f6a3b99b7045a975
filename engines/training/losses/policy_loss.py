"""PPO's clipped surrogate."""

import torch

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens
from cairn.engines.training.limits import bounded
from cairn.engines.training.protocol import TokenLosses


@plugin(needs={"advantages", "old_log_probs"}, reads={"eps_clip", "eps_clip_high", "eps_clip_c"})
def loss(log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig) -> TokenLosses:
    """Return [T] `policy_loss` of each token and metrics; `ppo_kl` measures how far the policy has moved."""
    assert tokens.old_log_probs is not None
    assert tokens.advantages is not None
    ppo_kl = tokens.old_log_probs - log_probs
    losses, clipped = policy_loss(
        ppo_kl,
        tokens.advantages,
        eps_clip=config.eps_clip,
        eps_clip_high=config.eps_clip_high,
        eps_clip_c=config.eps_clip_c,
    )
    return losses, {"pg_clipfrac": clipped, "ppo_kl": ppo_kl}


def policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token and whether its ratio was clipped (1) or not (0).

    With ratio r = exp(-ppo_kl), its logarithm clamped by `bounded`: L = max(-r A, -clip(r, 1 - eps_clip,
    1 + eps_clip_high) A), equation 7 of Schulman et al., "Proximal Policy Optimization Algorithms" (2017), with the
    separate upper range of DAPO (Yu et al., 2025).
    With `eps_clip_c` = c > 1, L is at most -c A where A < 0: equation 5 of Ye et al., "Mastering Complex Control in
    MOBA Games with Deep Reinforcement Learning" (2020).

    Args:
        ppo_kl: [T] old minus current log-probability of each token, in nats.
        advantages: [T].
        eps_clip_high: `eps_clip` where None.
    """
    ratio = torch.exp(bounded(-ppo_kl))
    high = eps_clip if eps_clip_high is None else eps_clip_high
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + high) * advantages
    loss = torch.maximum(unclipped, clipped)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, (clipped > unclipped).float()
