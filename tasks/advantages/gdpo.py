"""Group reward-decoupled normalization policy optimization (Liu et al. 2026, "GDPO: Group reward-Decoupled
Normalization Policy Optimization for Multi-reward RL Optimization", arXiv:2601.05242, section 3).

For a sample with rewards r_1 … r_n (`gdpo_reward_keys`) and weights w_1 … w_n (`gdpo_reward_weights`),

    A_k = (r_k - mean(r_k)) / (std(r_k) + 1e-6)    over the samples of its group, each reward by itself
    S   = Σ_k w_k · A_k
    A   = (S - mean(S)) / sqrt(var(S) + 1e-8)      over all samples of the batch

So a reward with a small or rare spread counts as much as its weight says, next to one with a large spread. In the plain
sum of the rewards it would be lost. Standard deviations and variances are unbiased.

As in the paper, the batch is normalised over samples, whatever their lengths. verl counts each sample once for every
trained token; that is this estimator with `normalize_advantages`, which shifts and scales the result once more, over
tokens.

Rewards belong to a sample, and its trajectories share the advantage. The sample's own reward takes part only where it
is named, as `reward`.
"""

import numpy as np

from cairn.configs.kinds import plugin
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch, normalise
from cairn.tasks.advantages.grpo import standardise
from cairn.tasks.grading.shaping import is_number


@plugin(needs={"components"}, reads={"gdpo_reward_keys", "gdpo_reward_weights"})
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Return advantages, which are the returns too: every token gets its sample's. Raises BadPlugin where a sample
    lacks one of the rewards."""
    sums = np.zeros(len(batch))
    weights = config.gdpo_reward_weights or [1.0] * len(config.gdpo_reward_keys)
    for key, weight in zip(config.gdpo_reward_keys, weights, strict=True):
        rewards = _rewards(batch, key)
        sums += weight * np.concatenate([standardise(rewards[group]) for group in batch.groups])
    (over_samples,) = normalise([sums], [np.ones(len(batch), np.uint8)])
    advantages = batch.spread(over_samples)
    return advantages, advantages


def _rewards(batch: ScoredBatch, key: str) -> np.ndarray:
    """Return [N] float64 rewards of one name."""
    assert batch.components is not None
    values = [components.get(key) for components in batch.components]
    missing = sum(not is_number(value) for value in values)
    if missing:  # of rewards that were committed before the key was named
        raise BadPlugin(
            f"advantage_estimator (gdpo) needs the reward {key!r} of gdpo_reward_keys, but {missing} of {len(values)} "
            "samples were graded without it: name rewards that their grader returned, or fork the run before they were "
            "graded"
        )
    return np.array(values, np.float64)
