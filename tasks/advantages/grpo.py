"""Group relative policy optimization (Shao et al. 2024, "DeepSeekMath", section 4.1.2).

    A_{i,t} = (r_i - mean(r)) / (std(r) + 1e-6)    mean and unbiased std over the samples of i's group

If a sample has several rewards, each counts for its share of the sample.

Without the division it is the advantage of Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training", section
3.2), whose loss is also divided by a constant: `algorithm.loss_scale_factor`.
"""

import numpy as np

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch

EPSILON = 1e-6
"""Term added to the standard deviation, as in slime."""


@plugin(reads={"rewards_normalization", "grpo_std_normalization"})
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Return advantages, which are the returns too: every token gets its sample's normalised reward.

    Each group is normalised over its own samples, however many there are.
    """
    normalised = batch.by_group(batch.rewards, lambda rewards, siblings: normalise(rewards, config, siblings))
    advantages = batch.spread(normalised)
    return advantages, advantages


def normalise(rewards: np.ndarray, config: AlgorithmConfig, siblings: np.ndarray | None = None) -> np.ndarray:
    """Return [G] float64 advantages from the [G] rewards of one group. `siblings`: see `ScoredBatch`."""
    rewards = rewards.astype(np.float64)
    if not config.rewards_normalization:
        return rewards
    return standardise(rewards, siblings) if config.grpo_std_normalization else centre(rewards, siblings)


def standardise(rewards: np.ndarray, siblings: np.ndarray | None = None) -> np.ndarray:
    """Return [G] float64 rewards less their mean, divided by (unbiased standard deviation + 1e-6); exactly 0 where all
    are equal."""
    centred = centre(rewards, siblings)
    if not centred.any():
        return centred
    if siblings is None:
        return centred / (rewards.std(ddof=1) + EPSILON)
    weights = shares(siblings)
    samples = weights.sum()
    variance = (weights * centred**2).sum() / (samples - 1 if samples > 1.5 else samples)
    return centred / (np.sqrt(variance) + EPSILON)


def centre(rewards: np.ndarray, siblings: np.ndarray | None = None) -> np.ndarray:
    """Return the [G] rewards of one group less the mean of its samples; exactly 0 if all are equal, or if there is one.

    In floating point the mean of equal rewards may differ from them by a rounding error, which a division by a standard
    deviation near zero would inflate.
    """
    mean = rewards.mean() if siblings is None else np.average(rewards, weights=shares(siblings))
    centred: np.ndarray = rewards - mean
    return centred if np.ptp(rewards) > 0 else np.zeros_like(rewards)


def shares(siblings: np.ndarray) -> np.ndarray:
    """Return [G] float64: the share that each entry of a group has in its sample. The shares of a sample add up to
    1."""
    _, sample, counts = np.unique(siblings, return_inverse=True, return_counts=True)
    shares: np.ndarray = 1 / counts[sample]
    return shares
