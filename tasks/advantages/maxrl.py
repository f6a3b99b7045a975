"""Maximum likelihood reinforcement learning (Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning").

    A_{i,t} = (r_i - mean(r)) / mean(r)    mean over the samples of i's group

With rewards of 0 and 1 the gradient is, for k samples, that of log p to the order k, where p is the chance of a right
answer: a prompt of which few samples are right counts for more than in `grpo`. Where the mean is not above 1e-6, as
that of wrong answers alone, nothing is divided.
"""

import numpy as np

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch
from cairn.tasks.advantages.grpo import EPSILON, centre


@plugin()
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Every token of a sample gets the sample's advantage, which is its return too."""
    pairs = zip(batch.groups, batch.siblings_of_groups, strict=True)
    advantages = batch.spread(np.concatenate([relative_to_the_mean(batch.rewards[group], own) for group, own in pairs]))
    return advantages, advantages


def relative_to_the_mean(rewards: np.ndarray, siblings: np.ndarray | None = None) -> np.ndarray:
    """[G] rewards of one group → [G] float64. `siblings`: see `ScoredBatch`."""
    rewards = rewards.astype(np.float64)
    centred = centre(rewards, siblings)
    mean = float((rewards - centred)[0])
    found: np.ndarray = centred / mean if mean > EPSILON else centred
    return found
