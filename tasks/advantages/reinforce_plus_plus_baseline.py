"""REINFORCE++ with a baseline (Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global
Advantage Normalization", section 3.2).

    A_{i,t} = r_i - mean(r) - kl_coef · KL_{i,t}      mean over the samples of i's group

`algorithm.normalize_advantages` then whitens these over the whole batch. Tokens that are not trained on have
advantage 0.
"""

import numpy as np

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch, TrainedTokens
from cairn.tasks.advantages.grpo import centre


@plugin(reads={"rewards_normalization", "kl_coef"})
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Return advantages, which are the returns too. Without `rewards_normalization` the mean is not subtracted."""
    rewards = batch.rewards.astype(np.float64)
    if config.rewards_normalization:
        rewards = batch.by_group(rewards, centre)
    tokens = TrainedTokens(batch.loss_masks)
    flat = rewards[tokens.samples]
    if config.kl_coef > 0:
        assert batch.kl is not None
        flat -= config.kl_coef * tokens.of(batch.kl)
    advantages = tokens.spread(flat)
    return advantages, advantages
