"""Proximal policy optimization with a critic: generalised advantage estimation (Schulman et al. 2016,
"High-Dimensional Continuous Control Using Generalized Advantage Estimation", equation 16).

Over the trained tokens t = 1 … T of a sample, with values V_t of the critic, V_{T+1} = 0 and the sample's reward r,

    r_t     = -kl_coef · KL_t,  and r more at t = T
    δ_t     = r_t + gamma · V_{t+1} - V_t
    A_t     = δ_t + gamma · lambd · A_{t+1}
    return  = A_t + V_t

Tokens that are not trained on are the environment's: they take no part, and have advantage and return 0.
"""

from collections.abc import Sequence

import numpy as np

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch


@plugin(needs={"values"}, reads={"gamma", "lambd", "kl_coef", "value_clip", "num_critic_only_steps"})
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Rewards are taken as they are, each sample for itself."""
    assert batch.values is not None
    masks = [mask.astype(bool) for mask in batch.loss_masks]
    counts = np.array([mask.sum() for mask in masks])
    trained = np.arange(counts.max(initial=0)) < counts[:, None]
    values_NT = _padded(batch.values, masks, trained)
    rewards_NT = np.zeros_like(values_NT)
    if config.kl_coef > 0:
        assert batch.kl is not None
        rewards_NT -= config.kl_coef * _padded(batch.kl, masks, trained)
    ended = np.flatnonzero(counts)
    rewards_NT[ended, counts[ended] - 1] += batch.rewards[ended]
    advantages_NT = gae(rewards_NT, values_NT, gamma=config.gamma, lambd=config.lambd)
    return _unpadded(advantages_NT, masks, trained), _unpadded(advantages_NT + values_NT, masks, trained)


def gae(rewards_NT: np.ndarray, values_NT: np.ndarray, *, gamma: float, lambd: float) -> np.ndarray:
    """[N, T] float64 advantages of N samples, which end where nothing but zeros follows."""
    following = np.pad(values_NT[:, 1:], ((0, 0), (0, 1)))
    advantages_NT: np.ndarray = rewards_NT + gamma * following - values_NT
    for t in range(advantages_NT.shape[1] - 2, -1, -1):
        advantages_NT[:, t] += gamma * lambd * advantages_NT[:, t + 1]
    return advantages_NT


def _padded(fields: Sequence[np.ndarray], masks: Sequence[np.ndarray], trained: np.ndarray) -> np.ndarray:
    """[N, T] float64: the trained tokens of each sample, zeros behind them."""
    padded = np.zeros(trained.shape)
    padded[trained] = np.concatenate([field[mask] for field, mask in zip(fields, masks, strict=True)])
    return padded


def _unpadded(padded: np.ndarray, masks: Sequence[np.ndarray], trained: np.ndarray) -> list[np.ndarray]:
    """Back to [T_i] float32 of each sample, zeros at tokens that are not trained on."""
    whole = []
    for row, kept, mask in zip(padded, trained, masks, strict=True):
        field = np.zeros(len(mask), np.float32)
        field[mask] = row[kept]
        whole.append(field)
    return whole
