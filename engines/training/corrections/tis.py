"""Truncated importance sampling between the trainer and the rollout engine."""

import torch

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens, require_field
from cairn.engines.training.limits import bounded


@plugin(reads={"tis_clip", "tis_clip_low", "tis_batch_normalize"})
def correct(tokens: Tokens, config: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return [T] `importance_weights` and metrics; `tis` is the ratio before it is clipped."""
    weights, ratio = importance_weights(
        require_field(tokens.old_log_probs),
        require_field(tokens.rollout_log_probs),
        low=config.tis_clip_low,
        high=config.tis_clip,
    )
    return weights, {"tis": ratio, "tis_clipfrac": (weights != ratio).float()}


def importance_weights(
    old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, *, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [T] weights clip(exp(old - rollout), low, high), which multiply the policy loss, and the unclipped ratios.

    The logarithms of the ratios are clamped by `bounded`. Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (2025). Both log-probs are of the policy that generated the tokens, as computed by the
    trainer and by the rollout engine. No gradient flows through the weights.
    """
    ratio = torch.exp(bounded(old_log_probs - rollout_log_probs)).detach()
    return ratio.clamp(low, high), ratio
