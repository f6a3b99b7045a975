"""From rewards to advantages. One estimator a file, each a pure function

    estimate(rewards_per_group, response_lengths, config) -> (advantages, returns)

`rewards_per_group` holds an array [G] for each group, `response_lengths` [N] the tokens of each of the N samples in the
same order; both results hold an array [T_i] float32 for each sample. What else there is, each an array [T_i] for each
sample, is given as keyword arguments: `loss_masks`, `values` of the critic, `kl` from the reference.
"""

from collections.abc import Callable

import numpy as np

from cairn.tasks.advantages import grpo, ppo

Estimator = Callable[..., tuple[list[np.ndarray], list[np.ndarray]]]

ESTIMATORS: dict[str, Estimator] = {"grpo": grpo.estimate, "ppo": ppo.estimate}


def get_estimator(name: str) -> Estimator:
    """The estimator that `algorithm.advantage_estimator` names."""
    return ESTIMATORS[name]
