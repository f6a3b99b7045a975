"""Turns and roles: advantages against numbers worked out by hand."""

from typing import Any

import numpy as np
import pytest

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import ScoredBatch, Turn
from cairn.tasks.advantages.step import Episodes, compared, estimate


def ones(*lengths: int) -> list[np.ndarray]:
    return [np.ones(length, np.uint8) for length in lengths]


def sampled(tokens: int, reason: str = "stop") -> dict[str, Any]:
    return {"tokens": tokens, "call": "0", "finish_reason": reason}


def world(tokens: int) -> dict[str, Any]:
    return {"tokens": tokens, "call": None, "finish_reason": None}


TURNS = [[Turn(0, 2, 1.0), Turn(3, 5)], [Turn(0, 1, 0.0), Turn(2, 4, 7.0)]]


def test_a_token_has_the_normalised_rewards_of_its_turn_and_of_all_that_follow() -> None:
    # R = {1, 0} of the first sample, whose reward is 1, and {0, 2} of the second, whose reward is 2: mean 0.75,
    # unbiased variance 2.75 / 3. What user code gave the last turn is not asked: it has what is left of the reward.
    batch = ScoredBatch(np.array([1.0, 2.0]), [2], ones(6, 4), turns=TURNS)
    first, second = estimate(batch, AlgorithmConfig(advantage_estimator="grpo_turns"))[0]
    std = np.sqrt(2.75 / 3)
    np.testing.assert_allclose(first, np.array([-0.5, -0.5, -0.75, -0.75, -0.75, 0.0]) / std, atol=1e-5)
    np.testing.assert_allclose(second, np.array([0.5, 1.25, 1.25, 1.25]) / std, atol=1e-5)
    unscaled = AlgorithmConfig(advantage_estimator="grpo_turns", grpo_std_normalization=False)
    np.testing.assert_allclose(estimate(batch, unscaled)[0][1], [0.5, 1.25, 1.25, 1.25], atol=1e-6)


def test_samples_of_one_turn_have_the_advantages_of_grpo() -> None:
    rewards = np.random.default_rng(0).normal(size=7).astype(np.float32)
    turns = [[Turn(0, 3)]] * 7
    batch = ScoredBatch(rewards, [4, 3], ones(*[3] * 7), turns=turns)
    found, expected = (estimate(batch, AlgorithmConfig(advantage_estimator=name))[0] for name in ("grpo_turns", "grpo"))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_equal_turns_have_no_advantage_however_their_sum_is_rounded() -> None:
    turns = [[Turn(0, 1, 0.1), Turn(1, 2, 0.1), Turn(2, 3, 0.1)]] * 2
    batch = ScoredBatch(np.float32([0.1 + 0.1 + 0.1] * 2), [2], ones(3, 3), turns=turns)
    assert not np.concatenate(estimate(batch, AlgorithmConfig(advantage_estimator="grpo_turns"))[0]).any()


EPISODES = Episodes(
    lengths=[[2, 3, 1], None, [2, 2], None],
    rewards=[[1.0, 0.0, 5.0], None, [0.0, 3.0], None],
    roles=[["solver", "solver", "selector"], ["solver"], ["selector", None], None],
    segments=[
        [sampled(2, "length"), world(1), sampled(2), sampled(1)],
        [sampled(4)],
        [sampled(2), sampled(1), world(1)],
        None,
    ],
    turn_rewards=[[None, None, 0.25, None], None, None, None],
)
BATCH = ScoredBatch(
    np.array([5.0, 2.0, 3.0, -1.0], np.float32),
    [4],
    ones(6, 4, 4, 2),
    values=[np.arange(10 * i, 10 * i + n, dtype=np.float32) for i, n in enumerate((6, 4, 4, 2))],
    truncated=np.array([False, True, False, True]),
    turns=EPISODES.turns([6, 4, 4, 2]),
)


def test_a_trajectory_with_its_own_reward_is_compared_with_those_of_its_role() -> None:
    found = compared(BATCH, EPISODES)
    assert found.batch.group_sizes == [3, 2, 2], "solvers, selectors, and those without a role"
    assert found.batch.rewards.tolist() == [1, 0, 2, 5, 0, 3, -1]
    assert found.batch.truncated is not None
    assert found.batch.truncated.tolist() == [True, False, True, False, False, False, True]
    assert found.batch.values is not None
    assert [one.tolist() for one in found.batch.values] == [
        [0, 1], [2, 3, 4], [10, 11, 12, 13], [5], [20, 21], [22, 23], [30, 31],
    ]  # fmt: skip
    assert found.batch.turns is not None
    assert [list(turns) for turns in found.batch.turns] == [
        [Turn(0, 2)], [Turn(1, 3, 0.25)], [Turn(0, 4)], [Turn(0, 1)], [Turn(0, 2)], [Turn(0, 1)], [Turn(0, 2)],
    ]  # fmt: skip
    # Baselines: of the solvers 1.25, where the two of the first sample count for one; of the selectors 2.5; of those
    # without a role 1. Back in the places of the samples.
    config = AlgorithmConfig(grpo_std_normalization=False)
    advantages = found.of_samples(estimate(found.batch, config)[0])
    assert [one.tolist() for one in advantages] == [
        [-0.25, -0.25, -1.25, -1.25, -1.25, 2.5], [0.75] * 4, [-2.5, -2.5, 2, 2], [-2, -2],
    ]  # fmt: skip


def test_left_out_of_a_baseline_is_the_whole_sample() -> None:
    found = compared(BATCH, EPISODES)
    advantages = found.of_samples(estimate(found.batch, AlgorithmConfig(advantage_estimator="rloo"))[0])
    assert [one.tolist() for one in advantages] == [
        [-1, -1, -2, -2, -2, 5], [1.5] * 4, [-5, -5, 4, 4], [-4, -4],
    ]  # fmt: skip


def test_trajectories_that_share_a_reward_are_one_response_and_the_batch_is_as_it_was() -> None:
    shared = Episodes(EPISODES.lengths, [None] * 4, [None] * 4, EPISODES.segments, EPISODES.turn_rewards)
    found = compared(BATCH, shared)
    assert found.batch.group_sizes == [4]
    assert found.batch.rewards.tolist() == BATCH.rewards.tolist()
    assert found.batch.loss_masks is BATCH.loss_masks
    assert found.of_samples(BATCH.loss_masks) == BATCH.loss_masks


def test_a_batch_without_turns_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the turns of samples"):
        estimate(ScoredBatch(np.zeros(1), [1], ones(2)), AlgorithmConfig(advantage_estimator="grpo_turns"))
