"""Group relative policy optimization (Shao et al. 2024, "DeepSeekMath", section 4.1.2).

    A_{i,t} = (r_i - mean(r)) / (std(r) + 1e-6)    mean and unbiased std over the samples of i's group

Without the division it is the advantage of Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training", section
3.2), whose loss is divided by a constant besides: `algorithm.loss_scale_factor`.
"""

import numpy as np

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch

EPSILON = 1e-6
"""Added to the standard deviation, as in slime."""


@plugin(reads={"rewards_normalization", "grpo_std_normalization"})
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Every token of a sample gets the sample's normalised reward, as its advantage and as its return.

    Each group is normalised over its own samples, however many there are.
    """
    advantages = batch.spread(np.concatenate([normalise(batch.rewards[group], config) for group in batch.groups]))
    return advantages, advantages


def normalise(rewards: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """[G] rewards of one group -> [G] advantages, in float64."""
    rewards = rewards.astype(np.float64)
    if not config.rewards_normalization:
        return rewards
    centred = centre(rewards)
    if not config.grpo_std_normalization or not centred.any():
        return centred
    return centred / (rewards.std(ddof=1) + EPSILON)


def centre(rewards: np.ndarray) -> np.ndarray:
    """[G] rewards of one group less their mean. Of equal ones, and of one alone, exactly 0: in floating point their
    mean may differ from them by a rounding error, which a division by a standard deviation near zero makes large."""
    centred: np.ndarray = rewards - rewards.mean()
    return centred if np.ptp(rewards) > 0 else np.zeros_like(rewards)
