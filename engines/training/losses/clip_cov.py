"""Clip-Cov (Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", equations
10 to 12; `clip_cov` in verl): PPO's clipped surrogate, without the gradient of a few tokens of high covariance.

Entropy falls where probable tokens have high advantages. Over the M trained tokens of an optimizer step,

    Cov_t = (log π_old(y_t) - mean log π_old) (A_t - mean A)

and of the tokens with clip_cov_lb < Cov_t < clip_cov_ub, max(1, ⌊clip_cov_ratio M⌋) are drawn at random. Their loss is
0. Paper and verl compute the covariance with the current policy over a micro-batch. Here it uses the policy before the
update, over the whole step; in the first step both policies are the same. So the drawn tokens do not depend on how the
step is cut. The random draw depends on the step's numbers alone.
"""

import hashlib

import numpy as np
import torch

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens, require_field
from cairn.engines.training.losses import policy_loss
from cairn.engines.training.losses.kl_cov import covariances
from cairn.engines.training.protocol import TokenLosses


def drawn(advantages: np.ndarray, log_probs: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """Return [M] bool: the tokens without gradient.

    Args:
        advantages: [M].
        log_probs: [M], before the update.
    """
    values = covariances(advantages, log_probs)
    candidates = np.flatnonzero((values > config.clip_cov_lb) & (values < config.clip_cov_ub))
    count = min(max(1, int(config.clip_cov_ratio * len(values))), len(candidates))
    seed = hashlib.sha256(values.tobytes()).digest()[:8]
    chosen = np.random.default_rng(int.from_bytes(seed, "little")).choice(candidates, count, replace=False)
    return np.isin(np.arange(len(values)), chosen)


@plugin(
    needs={"advantages", "old_log_probs"},
    reads={"eps_clip", "eps_clip_high", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"},
    picks=drawn,
)
def loss(log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig) -> TokenLosses:
    """Return [T] losses and the metrics of `policy_loss`; `cov_picked` is the share of drawn tokens."""
    losses, metrics = policy_loss.loss(log_probs, tokens, config)
    picked = require_field(tokens.picked)
    left = 1 - picked * (1 - metrics["pg_clipfrac"])  # clipped tokens have no gradient anyway
    return losses * left, {**metrics, "cov_picked": picked}
