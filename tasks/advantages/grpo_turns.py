"""GRPO with a reward for each turn (Shao et al. 2024, "DeepSeekMath", section 4.1.3, "Process Supervision RL with
GRPO": its steps are turns here). With index(j) the last token of turn j of K_i,

    r̃_{i,j} = (r_{i,j} - mean(R)) / (std(R) + 1e-6)    R: the rewards of all turns of all samples of i's group
    A_{i,t}  = Σ_{j: index(j) ≥ t} r̃_{i,j}

So a token is credited with the rewards of its own turn and of all later ones. User code gives turns their rewards
during generation; turns without one are not in R. The last turn gets the rest of the sample's reward,

    r_{i,K_i} = r_i - Σ_{j<K_i} r_{i,j}

so that the turns' rewards add up to the sample's reward, whatever its source: a grader, `episode` or the overlong
penalty. Where each sample has one turn, this is `grpo`.
"""

import numpy as np

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch
from cairn.tasks.advantages.grpo import normalise


@plugin(reads={"rewards_normalization", "grpo_std_normalization"})
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Return advantages, which are the returns too: every token gets the sum of the normalised rewards of its turn and
    of later ones, and 0 after the last turn. Raises ValueError for a batch without turns."""
    if batch.turns is None:
        raise ValueError("grpo_turns needs the turns of samples")
    advantages = [np.zeros(len(mask), np.float32) for mask in batch.loss_masks]
    for group in batch.groups:
        members = range(group.start, group.stop)
        paid = [(i, end, reward) for i in members for end, reward in _rewarded_turns(batch, i)]
        normalised = normalise(np.array([reward for _, _, reward in paid]), config)
        for (i, end, _), reward in zip(paid, normalised, strict=True):
            advantages[i][:end] += reward
    return advantages, advantages


def _rewarded_turns(batch: ScoredBatch, sample: int) -> list[tuple[int, float]]:
    """Return (end, reward) of each turn of a sample that has a reward."""
    assert batch.turns is not None
    turns = batch.turns[sample]
    rewarded = [(turn.end, turn.reward) for turn in turns[:-1] if turn.reward is not None]
    left = float(batch.rewards[sample]) - sum(reward for _, reward in rewarded)
    return [*rewarded, *((turn.end, round(left, 6)) for turn in turns[-1:])]  # the sample's reward is a float32
