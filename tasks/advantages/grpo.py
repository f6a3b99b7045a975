"""Group relative policy optimization (Shao et al. 2024, "DeepSeekMath", section 4.1.2).

    A_{i,t} = (r_i - mean(r)) / (std(r) + 1e-6)    mean and unbiased std over the samples of i's group

Without the division it is the advantage of Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training", section
3.2), whose loss is divided by a constant besides: `algorithm.loss_scale_factor`.
"""

from collections.abc import Sequence

import numpy as np

from cairn.configs.schema.algorithm import AlgorithmConfig

EPSILON = 1e-6
"""Added to the standard deviation, as in slime."""


def estimate(
    rewards_per_group: Sequence[np.ndarray], response_lengths: Sequence[int], config: AlgorithmConfig, **_: object
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Every token of a sample gets the sample's normalised reward, as its advantage and as its return.

    Each group is normalised over its own samples, however many there are. See `cairn.tasks.advantages` for the shapes.
    """
    per_sample = np.concatenate([normalise(rewards, config) for rewards in rewards_per_group])
    advantages = [
        np.full(length, advantage, np.float32) for advantage, length in zip(per_sample, response_lengths, strict=True)
    ]
    return advantages, advantages


def normalise(rewards: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """[G] rewards of one group -> [G] advantages, in float64."""
    rewards = rewards.astype(np.float64)
    if not config.rewards_normalization:
        return rewards
    # In floating point the mean of equal numbers may differ from them by a rounding error, which the division by a
    # standard deviation near zero would turn into an advantage.
    if np.ptp(rewards) == 0:
        return np.zeros_like(rewards)
    centred: np.ndarray = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + EPSILON) if config.grpo_std_normalization else centred
