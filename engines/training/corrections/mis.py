"""Importance sampling and rejection of tokens or responses, between the trainer and the rollout engine.

Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (2025), and the
mismatch helpers of slime and verl. With d_t = old_t - rollout_t over the T trained tokens of a response, the ratio of
each of its tokens is, by `tis_level`,

    token: exp(d_t)        sequence: exp(Σ_t d_t)        geometric: exp(1/T Σ_t d_t)

with exponents clamped by `bounded`. The weight is the ratio, limited by `tis_mode`: at most tis_clip (`truncate`),
clipped to between tis_clip_low and tis_clip (`clip`), or 0 outside of these two (`mask`). In addition, tokens are
rejected, which means a weight of 0,

- by `use_rs`, where the ratio by `rs_level` is outside of rs_lower_bound and rs_upper_bound;
- by `rs_veto_threshold`, in a response that has a token with exp(d_t) below it.

Rejected tokens leave the sum of the policy's losses. The divisor of that sum does not change. The entropy bonus and the
KL loss do not change either; the KL loss has its own weights (`cairn.engines.training.losses.objective`).
"""

import math

import torch

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig, RatioLevel
from cairn.engines.training.collate import Tokens, require_field
from cairn.engines.training.limits import bounded


@plugin(
    reads={
        "tis_clip",
        "tis_clip_low",
        "tis_level",
        "tis_mode",
        "tis_batch_normalize",
        "use_rs",
        "rs_level",
        "rs_lower_bound",
        "rs_upper_bound",
        "rs_veto_threshold",
    }
)
def correct(tokens: Tokens, config: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return [T] weights and metrics.

    `tis` is the ratio before it is limited, and `tis_clipfrac` the share of tokens whose ratio is outside of the
    limits. `rs_rejected` and `rs_vetoed` are the shares of tokens that `use_rs` and `rs_veto_threshold` reject.
    """
    log_ratios = require_field(tokens.old_log_probs) - require_field(tokens.rollout_log_probs)
    low, high = config.tis_clip_low, config.tis_clip
    ratio = _ratio(log_ratios, tokens, config.tis_level)
    weights = ratio.clamp(max=high)
    if config.tis_mode == "clip":
        weights = ratio.clamp(low, high)
    if config.tis_mode == "mask":
        weights = ratio.masked_fill((ratio < low) | (ratio > high), 0)
    metrics = {"tis": ratio, "tis_clipfrac": (weights != ratio).float()}
    if config.use_rs:
        tested = ratio if config.rs_level == config.tis_level else _ratio(log_ratios, tokens, config.rs_level)
        low, high = config.rs_bounds
        metrics["rs_rejected"] = ((tested < low) | (tested > high)).float()
        weights = weights * (1 - metrics["rs_rejected"])
    if config.rs_veto_threshold is not None:
        improbable = (log_ratios < math.log(config.rs_veto_threshold)).float()
        metrics["rs_vetoed"] = tokens.of_tokens((tokens.sums(improbable) > 0).float())
        weights = weights * (1 - metrics["rs_vetoed"])
    return weights, metrics


def _ratio(log_ratios: torch.Tensor, tokens: Tokens, level: RatioLevel) -> torch.Tensor:
    """Return the [T] ratios at a level."""
    if level == "sequence":
        log_ratios = tokens.of_tokens(tokens.sums(log_ratios))
    if level == "geometric":
        log_ratios = tokens.of_tokens(tokens.means(log_ratios))
    return torch.exp(bounded(log_ratios))
