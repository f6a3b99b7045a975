"""The clipped surrogate of PPO."""

import torch

from cairn.engines.training.losses.limits import bounded


def policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each token and whether its ratio was clipped (1) or not (0).

    With ratio r = exp(-ppo_kl), its logarithm held within `limits`: L = max(-r A, -clip(r, 1 - eps_clip,
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
