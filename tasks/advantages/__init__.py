"""From rewards to advantages. One estimator a file, each a pure function

    estimate(rewards_per_group, response_lengths, config) -> (advantages, returns)

`rewards_per_group` holds an array [G] for each group, `response_lengths` [N] the tokens of each of the N samples in the
same order; both results hold an array [T_i] float32 for each sample. An estimator that reads more, such as values or KL
divergences, takes it as keyword arguments.
"""

from collections.abc import Callable

import numpy as np

from tasks.advantages import grpo

Estimator = Callable[..., tuple[list[np.ndarray], list[np.ndarray]]]

ESTIMATORS: dict[str, Estimator] = {"grpo": grpo.estimate}


def get_estimator(name: str) -> Estimator:
    """The estimator that `algorithm.advantage_estimator` names."""
    return ESTIMATORS[name]
