"""Maximum likelihood reinforcement learning (Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning").

    A_{i,t} = (r_i - mean(r)) / mean(r)    mean over the samples of i's group

With rewards of 0 and 1 and k samples, the gradient is that of log p up to order k, where p is the probability of a
right answer. So a prompt with few right samples counts for more than in `grpo`. There is no division where the mean is
not above 1e-6, as in a group with only wrong answers.
"""

import numpy as np

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch
from cairn.tasks.advantages.grpo import EPSILON, centre


@plugin()
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Return advantages, which are the returns too: every token gets its sample's."""
    advantages = batch.spread(batch.by_group(batch.rewards, relative_to_the_mean))
    return advantages, advantages


def relative_to_the_mean(rewards: np.ndarray, siblings: np.ndarray | None = None) -> np.ndarray:
    """Return [G] float64 advantages from the [G] rewards of one group. `siblings`: see `ScoredBatch`."""
    rewards = rewards.astype(np.float64)
    centred = centre(rewards, siblings)
    mean = float((rewards - centred)[0])
    advantages: np.ndarray = centred / mean if mean > EPSILON else centred
    return advantages
