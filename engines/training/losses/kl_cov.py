"""KL-Cov (Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", equations
10 and 13; `kl_cov` in verl): the policy gradient with a KL penalty on the tokens of the highest covariance.

With r_t = π(y_t) / π_old(y_t), and Cov_t the covariance of `clip_cov` over the M trained tokens of an optimizer step,

    L_t = -r_t A_t + ppo_kl_coef |log r_t|    for the max(1, ⌊kl_cov_ratio M⌋) tokens of the highest Cov_t
    L_t = -r_t A_t                            for the others

No ratio is clipped; its logarithm is clamped by `bounded`.
"""

import numpy as np
import torch

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens, require_field
from cairn.engines.training.limits import bounded
from cairn.engines.training.protocol import TokenLosses


def covariances(advantages: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
    """Return [M] float64: for each token, the product of the deviations of its advantage and its log-prob from their
    means."""
    advantages, log_probs = advantages.astype(np.float64), log_probs.astype(np.float64)
    products: np.ndarray = (advantages - advantages.mean()) * (log_probs - log_probs.mean())
    return products


def highest(advantages: np.ndarray, log_probs: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """Return [M] bool: the penalised tokens.

    Args:
        advantages: [M].
        log_probs: [M], before the update.
    """
    values = covariances(advantages, log_probs)
    count = max(1, int(config.kl_cov_ratio * len(values)))
    order = np.argsort(-values, kind="stable")
    return np.isin(np.arange(len(values)), order[:count])


@plugin(needs={"advantages", "old_log_probs"}, reads={"kl_cov_ratio", "ppo_kl_coef"}, picks=highest)
def loss(log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig) -> TokenLosses:
    """Return [T] losses and metrics.

    `ppo_kl` measures how far the policy has moved, and `cov_picked` is the share of penalised tokens.
    """
    moved = log_probs - require_field(tokens.old_log_probs)
    picked = require_field(tokens.picked)
    losses = -torch.exp(bounded(moved)) * require_field(tokens.advantages)
    return losses + config.ppo_kl_coef * picked * moved.abs(), {"ppo_kl": -moved, "cov_picked": picked}
