"""REINFORCE++ (Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage
Normalization", section 3.1).

Over the trained tokens t = 1 … T of a sample with reward r,

    r_t = -kl_coef · KL_t,  and r more at t = T
    A_t = Σ_{u≥t} gamma^{u-t} · r_u

which `algorithm.normalize_advantages` then whitens over the whole batch: that is the baseline, and there is no group.
Tokens that are not trained on are the environment's: they take no part, discount nothing, and have advantage 0.
"""

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch, TrainedTokens


@plugin(reads={"gamma", "kl_coef"})
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Rewards are taken as they are, each sample for itself. Returns are the advantages before they are whitened."""
    tokens = TrainedTokens(batch.loss_masks)
    advantages = tokens.spread(tokens.discounted(batch.token_rewards(tokens, config.kl_coef), config.gamma))
    return advantages, advantages
