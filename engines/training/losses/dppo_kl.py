"""Divergence proximal policy optimization like `dppo_tv`, limited by the KL divergence KL(μ ‖ π) of the two-valued
distributions of "this token" and "another one" (Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement
Learning"; `dppo_kl` in verl):

    μ log(μ / π) + (1 - μ) log((1 - μ) / (1 - π))    in nats, μ and π those of y_t

The paper's threshold, 0.05, is the default.
"""

import torch

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens
from cairn.engines.training.losses.dppo_tv import within_a_divergence
from cairn.engines.training.protocol import TokenLosses


@plugin(needs={"advantages", "rollout_log_probs"}, reads={"eps_clip", "eps_clip_high"}, defaults={"eps_clip": 0.05})
def loss(log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig) -> TokenLosses:
    """Return [T] losses and the metrics of `dppo_tv`."""
    return within_a_divergence(log_probs, tokens, config, binary_kl)


def binary_kl(log_probs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """Return [T] divergences in nats, from log-probs.

    A log-prob of 0 may be of any probability that its number format rounds to 1. The probability of the other tokens is
    therefore taken to be at least the rounding error.
    """
    rounded_off = torch.finfo(log_probs.dtype).eps / 2
    others, others_before = (-torch.expm1(values) for values in (log_probs, behaviour))
    of_others = torch.special.xlogy(others_before, others_before.clamp(min=rounded_off) / others.clamp(min=rounded_off))
    return behaviour.exp() * (behaviour - log_probs) + of_others
