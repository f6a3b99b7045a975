"""GRPO with a reward for each turn (Shao et al. 2024, "DeepSeekMath", section 4.1.3, "Process Supervision RL with
GRPO": its steps are turns here). With index(j) the last token of turn j of K_i,

    r̃_{i,j} = (r_{i,j} - mean(R)) / (std(R) + 1e-6)    R: the rewards of all turns of all samples of i's group
    A_{i,t}  = Σ_{j: index(j) ≥ t} r̃_{i,j}

A token is answerable for the turn that it is of and for all that follow. The rewards of turns are those that user code
gave while it generated, and turns without one have no part in R; the last turn has what is left of the sample's reward,

    r_{i,K_i} = r_i - Σ_{j<K_i} r_{i,j}

so that the turns of a sample have its reward together, whoever gave it: a grader, `episode` or the overlong penalty.
Where each sample is of one turn this is `grpo`.
"""

import numpy as np

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch
from cairn.tasks.advantages.grpo import normalise


@plugin(reads={"rewards_normalization", "grpo_std_normalization"})
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Every token gets the sum of the normalised rewards of its turn and of those after it, and 0 after the last turn:
    advantage and return. ValueError for a batch without turns."""
    if batch.turns is None:
        raise ValueError("grpo_turns needs the turns of samples")
    advantages = [np.zeros(len(mask), np.float32) for mask in batch.loss_masks]
    for group in batch.groups:
        members = range(group.start, group.stop)
        paid = [(i, end, reward) for i in members for end, reward in _paid(batch, i)]
        normalised = normalise(np.array([reward for _, _, reward in paid]), config)
        for (i, end, _), reward in zip(paid, normalised, strict=True):
            advantages[i][:end] += reward
    return advantages, advantages


def _paid(batch: ScoredBatch, sample: int) -> list[tuple[int, float]]:
    """Where each turn of a sample ends that has a reward, and the reward."""
    assert batch.turns is not None
    turns = batch.turns[sample]
    found = [(turn.end, turn.reward) for turn in turns[:-1] if turn.reward is not None]
    left = float(batch.rewards[sample]) - sum(reward for _, reward in found)
    return [*found, *((turn.end, round(left, 6)) for turn in turns[-1:])]  # the sample's reward is a float32
