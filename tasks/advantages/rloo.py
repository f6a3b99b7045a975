"""REINFORCE leave-one-out (Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning
from Human Feedback in LLMs", section 3.3; Kool et al. 2019).

    R_i     = r_i - kl_coef · Σ_t KL_{i,t}                         over the trained tokens of the sample
    A_{i,t} = R_i - 1/(k-1) · Σ_{j≠i} R_j                          over the k samples of i's group

If a sample has several rewards, R_j is their mean. The baseline of a sample does not depend on that sample, so the
gradient is unbiased. A sample that is alone in its group has advantage 0.
"""

import numpy as np

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch, TrainedTokens
from cairn.tasks.advantages.grpo import centre, shares


@plugin(reads={"kl_coef"})
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Return advantages, which are the returns too: every token gets its sample's."""
    rewards = batch.rewards.astype(np.float64)
    if config.kl_coef > 0:
        assert batch.kl is not None
        tokens = TrainedTokens(batch.loss_masks)
        rewards -= config.kl_coef * np.bincount(tokens.samples, tokens.of(batch.kl), len(rewards))
    advantages = batch.spread(batch.by_group(rewards, against_the_others))
    return advantages, advantages


def against_the_others(rewards: np.ndarray, siblings: np.ndarray | None = None) -> np.ndarray:
    """Return [k] float64: each of the [k] rewards of a group less the mean of the other samples, 0 where there are
    none.

    `siblings`: see `ScoredBatch`.
    """
    if siblings is None:
        return centre(rewards) * (len(rewards) / max(len(rewards) - 1, 1))
    weights, samples = shares(siblings), len(set(siblings.tolist()))
    if samples == 1 or np.ptp(rewards) == 0:
        return np.zeros_like(rewards)
    of_sample = np.array([(weights * rewards)[siblings == own].sum() for own in siblings])
    advantages: np.ndarray = rewards - ((weights * rewards).sum() - of_sample) / (samples - 1)
    return advantages
