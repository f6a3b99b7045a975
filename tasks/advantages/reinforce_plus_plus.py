"""REINFORCE++ (Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage
Normalization", section 3.1).

Over the trained tokens t = 1 … T of a sample with reward r,

    r_t = -kl_coef · KL_t,  plus r at t = T
    A_t = Σ_{u≥t} gamma^{u-t} · r_u

`algorithm.normalize_advantages` then whitens these over the whole batch. That is the baseline; groups play no role.
Tokens that are not trained on belong to the environment: they take no part, discount nothing, and have advantage 0.
"""

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch, TrainedTokens


@plugin(reads={"gamma", "kl_coef"})
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Return advantages, which are the returns too, before they are whitened. Rewards are not normalised, and samples
    are independent of each other."""
    tokens = TrainedTokens(batch.loss_masks)
    advantages = tokens.spread(tokens.discounted(batch.token_rewards(tokens, config.kl_coef), config.gamma))
    return advantages, advantages
