"""Truncated importance sampling between the trainer and the rollout engine (Yao et al. 2025, "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training"):

    w_t = clip(exp(log π_old(y_t) - log π_rollout(y_t)), tis_clip_low, tis_clip)
"""

import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens, given
from cairn.engines.training.losses.limits import bounded
from cairn.engines.training.losses.protocol import TokenLosses


def correct(tokens: Tokens, config: AlgorithmConfig) -> TokenLosses:
    """[T] weights; of the metrics, the ratios before and how many were clipped."""
    old, rollout = given(tokens.old_log_probs), given(tokens.rollout_log_probs)
    weights, ratio = importance_weights(old, rollout, low=config.tis_clip_low, high=config.tis_clip)
    return weights, {"tis": ratio, "tis_clipfrac": (weights != ratio).float()}


def importance_weights(
    old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, *, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] weights clip(exp(old - rollout), low, high), which multiply the policy loss, and the ratios before, their
    logarithms held within `limits`. Both log-probs are of
    the policy that generated the tokens, as the trainer and as the rollout engine computed them; no gradient flows.
    """
    ratio = torch.exp(bounded(old_log_probs - rollout_log_probs)).detach()
    return ratio.clamp(low, high), ratio
