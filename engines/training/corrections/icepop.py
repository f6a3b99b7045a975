"""IcePop: mask tokens for which trainer and rollout engine differ too much.

Ling Team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model" (2025), section 3.1:
with r = exp(old - rollout), its logarithm clamped by `bounded`, the weight is r where tis_clip_low ≤ r ≤ tis_clip, and
0 elsewhere. The paper's bounds are 0.5 and 5.
"""

import torch

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens, require_field
from cairn.engines.training.limits import bounded


@plugin(reads={"tis_clip", "tis_clip_low", "tis_batch_normalize"})
def correct(tokens: Tokens, config: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return [T] weights and metrics: `tis` is the ratio, `tis_clipfrac` the share of masked tokens."""
    ratio = torch.exp(bounded(require_field(tokens.old_log_probs) - require_field(tokens.rollout_log_probs)))
    outside = (ratio < config.tis_clip_low) | (ratio > config.tis_clip)
    return ratio.masked_fill(outside, 0), {"tis": ratio, "tis_clipfrac": outside.float()}
