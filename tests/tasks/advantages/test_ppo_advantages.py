"""Generalised advantage estimation, against the sums that define it; and what is done to advantages afterwards."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages import step as estimators
from cairn.tasks.advantages.batch import normalise


@dataclasses.dataclass
class Samples:
    """Two groups of samples, some of whose tokens are the environment's."""

    rewards: list[np.ndarray]
    masks: list[np.ndarray]
    values: list[np.ndarray]
    kl: list[np.ndarray]


def draw_samples(seed: int, lengths: list[int]) -> Samples:
    draw = np.random.default_rng(seed)
    rewards = draw.normal(size=len(lengths)).astype(np.float32)
    cut = len(lengths) // 2
    return Samples(
        [rewards[:cut], rewards[cut:]],
        [(draw.random(n) < 0.7).astype(np.uint8) for n in lengths],
        [draw.normal(size=n).astype(np.float32) for n in lengths],
        [draw.normal(size=n) for n in lengths],
    )


def estimate(samples: Samples, config: AlgorithmConfig) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rewards, sizes = np.concatenate(samples.rewards), [len(group) for group in samples.rewards]
    batch = estimators.ScoredBatch(rewards, sizes, samples.masks, values=samples.values, kl=samples.kl)
    return estimators.estimate(batch, config)


def ppo(**options: float) -> AlgorithmConfig:
    return AlgorithmConfig(advantage_estimator="ppo", **options)  # type: ignore[arg-type]


def defined(reward: float, values: list[float], kl: list[float], config: AlgorithmConfig) -> list[float]:
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, of one sample all of whose tokens are trained on."""
    count = len(values)
    rewards = [-config.kl_coef * kl[t] + (reward if t == count - 1 else 0.0) for t in range(count)]
    deltas = [rewards[t] + config.gamma * (values[t + 1] if t + 1 < count else 0.0) - values[t] for t in range(count)]
    return [sum((config.gamma * config.lambd) ** (u - t) * deltas[u] for u in range(t, count)) for t in range(count)]


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 9), min_size=2, max_size=6),
    st.floats(0.5, 1.0),
    st.floats(0.0, 1.0),
    st.sampled_from([0.0, 0.1]),
)
def test_advantages_are_the_sums_that_define_them_over_trained_tokens_alone(
    seed: int, lengths: list[int], gamma: float, lambd: float, kl_coef: float
) -> None:
    samples, config = draw_samples(seed, lengths), ppo(gamma=gamma, lambd=lambd, kl_coef=kl_coef)
    advantages, returns = estimate(samples, config)
    rewards = np.concatenate(samples.rewards)
    for i, mask in enumerate(samples.masks):
        trained = mask.astype(bool)
        expected = defined(rewards[i], samples.values[i][trained].tolist(), samples.kl[i][trained].tolist(), config)
        np.testing.assert_allclose(advantages[i][trained], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            returns[i][trained], np.add(expected, samples.values[i][trained]), rtol=1e-5, atol=1e-6
        )
        assert not advantages[i][~trained].any()
        assert not returns[i][~trained].any()
        assert advantages[i].dtype == returns[i].dtype == np.float32


def test_undiscounted_returns_are_the_reward_and_one_step_advantages_the_critics_own_errors() -> None:
    values, ones = [np.array([0.5, 2.0, 1.0], np.float32)], [np.ones(3, np.uint8)]
    samples = Samples([np.array([3.0], np.float32)], ones, values, [np.zeros(3)])
    advantages, returns = estimate(samples, ppo())
    assert returns[0].tolist() == [3, 3, 3]
    assert advantages[0].tolist() == [2.5, 1, 2]
    assert estimate(samples, ppo(lambd=0.0))[0][0].tolist() == [1.5, -1, 2]


def test_a_sample_without_a_trained_token_takes_no_part() -> None:
    samples = draw_samples(0, [4, 3, 5])
    samples.masks[1][:] = 0
    advantages, returns = estimate(samples, ppo(gamma=0.9))
    assert not advantages[1].any()
    assert not returns[1].any()
    assert [len(a) for a in advantages] == [4, 3, 5]


def test_normalised_advantages_have_mean_0_and_variance_1_over_the_trained_tokens_of_the_batch() -> None:
    samples = draw_samples(2, [30, 50, 9])
    advantages = [5 + 3 * values for values in samples.values]
    normalised = normalise(advantages, samples.masks)
    masks = [mask.astype(bool) for mask in samples.masks]
    trained = np.concatenate([a[mask] for a, mask in zip(normalised, masks, strict=True)])
    assert trained.mean() == pytest.approx(0, abs=1e-6)
    assert trained.var(ddof=1) == pytest.approx(1, rel=1e-5)
    assert not any(a[~mask].any() for a, mask in zip(normalised, masks, strict=True))
    before = np.concatenate([a[mask] for a, mask in zip(advantages, masks, strict=True)])
    assert np.corrcoef(before, trained)[0, 1] == pytest.approx(1)


def test_equal_advantages_are_normalised_to_nothing() -> None:
    masks = [np.ones(3, np.uint8), np.array([0, 1], np.uint8)]
    for value in (0.1, 7.0):
        normalised = normalise([np.full(3, value, np.float32), np.full(2, value, np.float32)], masks)
        assert [a.tolist() for a in normalised] == [[0, 0, 0], [0, 0]]
