"""Group-relative advantages, against closed forms and against torch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages import step as estimators

GRPO = AlgorithmConfig()
DR_GRPO = AlgorithmConfig(grpo_std_normalization=False)
RAW = AlgorithmConfig(rewards_normalization=False)
rewards = st.floats(-100, 100, allow_nan=False, width=32)


def estimate(groups, config, lengths=None):
    sizes = [len(group) for group in groups]
    masks = [np.ones(length, np.uint8) for length in lengths or [1] * sum(sizes)]
    rewards = np.array([reward for group in groups for reward in group], np.float32)
    return estimators.estimate(estimators.ScoredBatch(rewards, sizes, masks), config)


def per_sample(groups, config):
    return [float(advantage[0]) for advantage in estimate(groups, config)[0]]


def test_k_right_of_n_have_the_closed_form():
    # With k ones among n: mean k/n, unbiased variance k(n-k)/(n(n-1)).
    for n, k in [(8, 1), (8, 4), (8, 7), (2, 1), (5, 2)]:
        std = math.sqrt(k * (n - k) / (n * (n - 1))) + 1e-6
        expected = [(1 - k / n) / std] * k + [(-k / n) / std] * (n - k)
        assert per_sample([[1] * k + [0] * (n - k)], GRPO) == pytest.approx(expected, rel=1e-6)


def test_without_std_the_advantage_is_the_distance_from_the_mean():
    assert per_sample([[1, 0, 0, 0], [3, 5]], DR_GRPO) == [0.75, -0.25, -0.25, -0.25, -1, 1]


def test_without_normalisation_the_advantage_is_the_reward():
    assert per_sample([[1, 0], [0.25, 0.25]], RAW) == [1, 0, 0.25, 0.25]


def test_groups_of_different_sizes_are_normalised_each_by_itself():
    groups = [[1, 0, 0], [1, 1, 0, 0, 0], [7], [0, 2]]
    together = per_sample(groups, GRPO)
    assert together == [value for group in groups for value in per_sample([group], GRPO)]


@pytest.mark.parametrize("config", [GRPO, DR_GRPO])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.9, 0.1, 1e-8, 12345.678])
def test_a_group_of_equal_rewards_has_no_advantage_at_all(config, value):
    for n in (1, 3, 7, 8):
        assert per_sample([[value] * n], config) == [0.0] * n


@given(st.lists(rewards, min_size=2, max_size=16))
def test_the_values_are_those_of_torch(group):
    values = torch.tensor(group, dtype=torch.float64)
    expected = (values - values.mean()) / (values.std() + 1e-6) if values.max() > values.min() else values * 0
    assert per_sample([group], GRPO) == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-6)


def test_every_token_of_a_sample_has_the_samples_advantage():
    advantages, returns = estimate([[1, 0], [0, 1]], DR_GRPO, lengths=[3, 1, 0, 2])
    expected = [[0.5] * 3, [-0.5], [], [0.5] * 2]
    assert [array.tolist() for array in advantages] == expected
    assert [array.tolist() for array in returns] == expected
    assert {array.dtype for array in advantages} == {np.dtype(np.float32)}


def test_a_missing_sample_is_an_error():
    with pytest.raises(ValueError, match="3 rewards for 2 samples"):
        estimate([[1, 0, 1]], GRPO, lengths=[1, 1])
