"""All estimators against plain loops from their papers, and properties that hold of any ragged batch: groups of any
size, masks with holes, empty responses, equal rewards, samples of several trajectories."""

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.configs.kinds import ESTIMATOR, declared
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import RunConfig
from cairn.tasks.advantages import step as estimators
from cairn.tasks.advantages.batch import ScoredBatch, normalise
from tests.mistakes import mistakes

WHITENED = {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}
RELATIVE = ("grpo", "rloo", "reinforce_plus_plus_baseline")
"""Those that compare a sample with its group."""
OF_TOKENS = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Those whose advantage is 0 at tokens that are not trained on."""
BUILT_IN = sorted({*RELATIVE, *OF_TOKENS, "maxrl"})


def algorithm(name: str, **options: Any) -> AlgorithmConfig:
    return AlgorithmConfig(advantage_estimator=name, normalize_advantages=name in WHITENED, **options)


@st.composite
def batches(draw: st.DrawFn) -> ScoredBatch:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    total = sum(sizes)
    lengths = draw(st.lists(st.integers(0, 7), min_size=total, max_size=total))
    levels = draw(st.sampled_from([(0.0, 1.0), (0.9,), (-1.0, 0.1, 0.3, 2.5)]))
    rewards = draw(st.lists(st.sampled_from(levels), min_size=total, max_size=total))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return ScoredBatch(
        np.array(rewards, np.float32),
        sizes,
        [(random.random(n) < 0.7).astype(np.uint8) for n in lengths],
        values=[random.normal(size=n).astype(np.float32) for n in lengths],
        kl=[random.normal(size=n) for n in lengths],
        truncated=random.random(total) < 0.3,
    )


def reordered(batch: ScoredBatch, groups: list[int]) -> tuple[ScoredBatch, np.ndarray]:
    """The batch with its groups in another order, and the samples in that order."""
    slices = list(batch.groups)
    samples = np.concatenate([np.arange(len(batch))[slices[group]] for group in groups])
    lists = {name: [getattr(batch, name)[i] for i in samples] for name in ("loss_masks", "values", "kl")}
    sizes = [batch.group_sizes[group] for group in groups]
    assert batch.truncated is not None
    return dataclasses.replace(
        batch, rewards=batch.rewards[samples], group_sizes=sizes, truncated=batch.truncated[samples], **lists
    ), samples


def looped(batch: ScoredBatch, config: AlgorithmConfig) -> list[list[float]]:
    """The advantage of each trained token of each sample, one after the other, as the papers have them."""
    assert batch.kl is not None
    assert batch.values is not None
    assert batch.truncated is not None
    rewards = [float(reward) for reward in batch.rewards]
    trained = [[t for t in range(len(mask)) if mask[t]] for mask in batch.loss_masks]
    kl = [[float(batch.kl[i][t]) for t in trained[i]] for i in range(len(batch))]
    values = [[float(batch.values[i][t]) for t in trained[i]] for i in range(len(batch))]
    beta, found = config.kl_coef, []
    for group in batch.groups:
        members = range(len(batch))[group]
        for i in members:
            count, others = len(trained[i]), [j for j in members if j != i]
            if config.advantage_estimator in ("grpo", "reinforce_plus_plus_baseline"):
                mean = math.fsum(rewards[j] for j in members) / len(members)
                advantage = rewards[i] - mean
                if config.advantage_estimator == "grpo" and others:
                    advantage /= math.sqrt(sum((rewards[j] - mean) ** 2 for j in members) / len(others)) + 1e-6
                found.append([advantage - beta * kl[i][t] for t in range(count)])
            elif config.advantage_estimator == "maxrl":
                mean = math.fsum(rewards[j] for j in members) / len(members)
                found.append([(rewards[i] - mean) / (mean if mean > 1e-6 else 1)] * count)
            elif config.advantage_estimator == "rloo":
                scores = {j: rewards[j] - beta * sum(kl[j]) for j in members}
                baseline = sum(scores[j] for j in others) / len(others) if others else scores[i]
                found.append([scores[i] - baseline] * count)
            elif config.advantage_estimator == "reinforce_plus_plus":
                paid = [-beta * kl[i][t] + (rewards[i] if t == count - 1 else 0.0) for t in range(count)]
                found.append([sum(config.gamma ** (u - t) * paid[u] for u in range(t, count)) for t in range(count)])
            else:
                found.append(gae(rewards[i], values[i], kl[i], bool(batch.truncated[i]), config))
    return found


def gae(reward: float, values: list[float], kl: list[float], cut: bool, config: AlgorithmConfig) -> list[float]:
    """Of one sample. One that was cut is an episode of all tokens but the last, whose value is what follows."""
    bootstraps = cut and config.bootstrap_truncated and len(values) > 0
    steps = len(values) - 1 if bootstraps else len(values)
    after = [*values[1:], 0.0]
    paid = [-config.kl_coef * kl[t] for t in range(steps)]
    if steps and not bootstraps:
        paid[-1] += reward
    errors = [paid[t] + config.gamma * after[t] - values[t] for t in range(steps)]
    factor = config.gamma * config.lambd
    found = [sum(factor ** (u - t) * errors[u] for u in range(t, steps)) for t in range(steps)]
    return [*found, 0.0] if bootstraps else found


def settings_of(name: str) -> list[AlgorithmConfig]:
    reads = declared(ESTIMATOR.load(name)).reads
    found = [algorithm(name)]
    if "kl_coef" in reads:
        found.append(algorithm(name, kl_coef=0.3))
    if "gamma" in reads:
        found.append(algorithm(name, gamma=0.8, kl_coef=0.3))
    if "bootstrap_truncated" in reads:
        found.append(algorithm(name, bootstrap_truncated=True, gamma=0.9, lambd=0.7, kl_coef=0.3))
    return found


EVERY = [(name, index) for name in BUILT_IN for index in range(len(settings_of(name)))]


@pytest.mark.parametrize(("name", "index"), EVERY)
@settings(max_examples=40, deadline=None)
@given(batch=batches())
def test_advantages_are_those_of_a_loop_from_the_paper_and_finite(name: str, index: int, batch: ScoredBatch) -> None:
    config = settings_of(name)[index]
    advantages, returns = estimators.estimate(batch, config)
    for mask, advantage, expected in zip(batch.loss_masks, advantages, looped(batch, config), strict=True):
        np.testing.assert_allclose(advantage[mask == 1], expected, rtol=1e-5, atol=2e-6)
    for mask, *fields in zip(batch.loss_masks, advantages, returns, strict=True):
        assert all(field.shape == mask.shape and np.isfinite(field).all() for field in fields)
        assert name not in OF_TOKENS or not any(field[mask == 0].any() for field in fields)


@pytest.mark.parametrize(("name", "index"), EVERY)
@settings(max_examples=15, deadline=None)
@given(batch=batches(), data=st.data())
def test_a_group_has_the_same_advantages_wherever_it_stands(
    name: str, index: int, batch: ScoredBatch, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(batch.group_sizes))))
    config = settings_of(name)[index]
    before, _ = estimators.estimate(batch, config)
    moved, samples = reordered(batch, list(order))
    after, _ = estimators.estimate(moved, config)
    assert [field.tolist() for field in after] == [before[i].tolist() for i in samples]


def of_samples(batch: ScoredBatch, config: AlgorithmConfig) -> np.ndarray:
    """[N]: the advantage of each sample, were it one trained token."""
    ones = dataclasses.replace(batch, loss_masks=[np.ones(1, np.uint8)] * len(batch))
    return np.concatenate(estimators.estimate(ones, config)[0])


@pytest.mark.parametrize("name", RELATIVE)
@settings(max_examples=25, deadline=None)
@given(batch=batches(), shift=st.integers(-8, 8), scale=st.integers(2, 9))
def test_what_is_relative_to_a_group_adds_up_to_nothing_and_knows_no_origin_of_rewards(
    name: str, batch: ScoredBatch, shift: int, scale: int
) -> None:
    config = algorithm(name)
    found = of_samples(batch, config)
    for group in batch.groups:
        assert abs(found[group].sum()) < 1e-5
        if np.ptp(batch.rewards[group]) == 0:
            assert not found[group].any()  # a group of one too
    moved = dataclasses.replace(batch, rewards=batch.rewards.astype(np.float64) + shift)
    np.testing.assert_allclose(of_samples(moved, config), found, atol=1e-5)
    scaled = dataclasses.replace(batch, rewards=batch.rewards.astype(np.float64) * scale)
    expected = found if name == "grpo" else found * scale  # GRPO divides by the standard deviation
    np.testing.assert_allclose(of_samples(scaled, config), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(batch=batches())
def test_whitened_advantages_have_mean_0_and_bessels_variance_1_over_the_batch(batch: ScoredBatch) -> None:
    advantages, _ = estimators.estimate(batch, algorithm("reinforce_plus_plus", kl_coef=0.3))
    found = normalise(advantages, batch.loss_masks)
    trained = [float(a) for field, mask in zip(found, batch.loss_masks, strict=True) for a in field[mask == 1]]
    before = [float(a) for field, mask in zip(advantages, batch.loss_masks, strict=True) for a in field[mask == 1]]
    assert not any(field[mask == 0].any() for field, mask in zip(found, batch.loss_masks, strict=True))
    if len(set(before)) < 2:  # none, one, or equal ones
        assert not any(trained)
        return
    mean = math.fsum(before) / len(before)
    variance = math.fsum((a - mean) ** 2 for a in before) / (len(before) - 1)
    np.testing.assert_allclose(trained, [(a - mean) / math.sqrt(variance + 1e-8) for a in before], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=15, deadline=None)
@given(batch=batches(), data=st.data())
def test_tokens_of_the_world_move_nothing_wherever_they_stand(
    name: str, batch: ScoredBatch, data: st.DataObject
) -> None:
    """As between the trajectories of one sample, which has one reward and one place in the baseline."""
    config = algorithm(name)
    i = data.draw(st.integers(0, len(batch) - 1))
    place = data.draw(st.integers(0, len(batch.loss_masks[i])))
    widened = {}
    for field in ("loss_masks", "values", "kl"):
        lists = list(getattr(batch, field))
        lists[i] = np.insert(lists[i], place, [0, 0] if field == "loss_masks" else [7.0, -7.0])
        widened[field] = lists
    before, _ = estimators.estimate(batch, config)
    after, _ = estimators.estimate(dataclasses.replace(batch, **widened), config)
    for a, b, mask, wide in zip(before, after, batch.loss_masks, widened["loss_masks"], strict=True):
        assert a[mask == 1].tolist() == b[wide == 1].tolist()


def test_leave_one_out_is_the_distance_from_the_mean_of_the_others() -> None:
    rewards = np.array([1, 0, 0, 4, 2, 5], np.float32)
    batch = ScoredBatch(rewards, [3, 2, 1], [np.ones(1, np.uint8)] * 6)
    assert np.concatenate(estimators.estimate(batch, algorithm("rloo"))[0]).tolist() == [1, -0.5, -0.5, 2, -2, 0]


def test_a_response_that_was_cut_is_worth_what_the_critic_expects_and_not_its_reward() -> None:
    """gamma 1/2, lambd 1, values 4, 2, 8: the last token stands for 8, so the one before it is worth 4 and the first
    2; without, the reward 1 is worth 1, 1/2 and 1/4."""
    values, ones = [np.array([4.0, 2.0, 8.0], np.float32)], [np.ones(3, np.uint8)]
    batch = ScoredBatch(np.ones(1, np.float32), [1], ones, values=values, truncated=np.array([True]))
    bootstrapped = algorithm("ppo", gamma=0.5, bootstrap_truncated=True)
    advantages, returns = estimators.estimate(batch, bootstrapped)
    assert (advantages[0].tolist(), returns[0].tolist()) == ([-2, 2, 0], [2, 4, 8])
    assert estimators.estimate(batch, algorithm("ppo", gamma=0.5))[1][0].tolist() == [0.25, 0.5, 1]
    ended = dataclasses.replace(batch, truncated=np.array([False]))
    assert estimators.estimate(ended, bootstrapped)[1][0].tolist() == [0.25, 0.5, 1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"advantage_estimator": "reinforce_plus_plus"},
            "is false; set normalize_advantages=true",
        ),
        (
            {"kl_coef": 0.1},
            r"kl_coef \(0.1\) has no effect while algorithm.advantage_estimator is grpo; set",
        ),
        (
            {"bootstrap_truncated": True},
            r"bootstrap_truncated \(true\) has no effect while algorithm.advantage_estimator is",
        ),
        (
            {"advantage_estimator": "rloo", "grpo_std_normalization": False},
            "has no effect while algorithm.advantage_estimator",
        ),
        ({"advantage_estimator": "rloo", "gamma": 0.9}, "has no effect while algorithm.advantage_estimator is rloo"),
    ],
)
def test_what_an_estimator_does_not_read_is_said(options: dict[str, Any], says: str) -> None:
    assert re.search(says, mistakes(algorithm=options))


def test_one_sample_cannot_be_compared_with_others() -> None:
    with pytest.raises(ValueError, match=r"rloo but rollout\.n_samples_per_prompt is 1"):
        RunConfig.model_validate(
            {
                "model": {"path": "m"},
                "data": {"path": "d"},
                "rollout": {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 1}
                | {"rollout_max_response_len": 4},
                "algorithm": {"advantage_estimator": "rloo"},
            }
        )
