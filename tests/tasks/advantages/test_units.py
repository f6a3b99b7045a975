"""A sample has one advantage, however many trajectories it went through: every estimator of ours, any batch."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.configs.kinds import ESTIMATOR
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import ScoredBatch
from cairn.tasks.advantages.step import Episodes, compared, estimate
from tests.tables import cases
from tests.tasks.advantages.test_estimators import WHITENED

ROLES = ("solver", "judge", None)


@dataclass
class Written:
    """A sample: the tokens of its trajectories, the reward and the role of each."""

    lengths: list[int]
    rewards: list[float] | None
    """None: a grader gave the sample one."""
    roles: list[str | None] | None
    reward: float

    def split(self, sizes: list[list[int]]) -> "Written":
        """Each trajectory as several with its reward and role."""
        counts = list(map(len, sizes))
        rewards = self.rewards and [r for r, n in zip(self.rewards, counts, strict=True) for _ in range(n)]
        roles = self.roles and [r for r, n in zip(self.roles, counts, strict=True) for _ in range(n)]
        return Written([size for parts in sizes for size in parts], rewards, roles, self.reward)


def advantages(samples: list[Written], sizes: list[int], fields: dict[str, Any], name: str) -> list[np.ndarray]:
    several: dict[str, Any] = {"gdpo_reward_keys": ["reward", "other"]} if name == "gdpo" else {}
    config = AlgorithmConfig(advantage_estimator=name, normalize_advantages=name in WHITENED, **several)
    turns = [
        [
            {"tokens": length, "call": f"{place}", "finish_reason": "stop"}
            for place, length in enumerate(fields["turns"][i])
        ]
        for i in range(len(samples))
    ]
    episodes = Episodes(
        [sample.lengths if len(sample.lengths) > 1 else None for sample in samples],
        [sample.rewards for sample in samples],
        [sample.roles for sample in samples],
        turns,
        [[0.25] * len(own) for own in turns],
    )
    totals = [sum(sample.lengths) for sample in samples]
    batch = ScoredBatch(
        np.array([sample.reward for sample in samples], np.float32),
        sizes,
        fields["masks"],
        values=fields["values"],
        old_log_probs=fields["values"],
        ref_log_probs=fields["values"],
        truncated=np.zeros(len(samples), bool),
        turns=episodes.turns(totals),
        components=[{"reward": s.reward, "other": x} for s, x in zip(samples, fields["others"], strict=True)]
        if several
        else None,
    )
    units = compared(batch, episodes)
    return units.of_samples(estimate(units.batch, config)[0])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Written], list[int], dict[str, Any], int, Written]:
    """Samples in groups, and one of them with another number of trajectories."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    samples = []
    for _ in range(sum(sizes)):
        lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        several = len(lengths) > 1 and draw(st.booleans())
        rewards = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(lengths), max_size=len(lengths)))
        roles = draw(st.none() | st.lists(st.sampled_from(ROLES), min_size=len(lengths), max_size=len(lengths)))
        samples.append(Written(lengths, rewards if several else None, roles, rewards[-1]))
    chosen = draw(st.integers(0, len(samples) - 1))
    parts = [draw(st.sampled_from(list(cuts(length)))) for length in samples[chosen].lengths]
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    totals = [sum(sample.lengths) for sample in samples]
    fields = {
        "masks": [(random.random(total) < 0.8).astype(np.uint8) for total in totals],
        "values": [random.normal(size=total).astype(np.float32) for total in totals],
        "turns": [[1] * total for total in totals],
        "others": random.normal(size=len(samples)).tolist(),
    }
    return samples, sizes, fields, chosen, samples[chosen].split(parts)


def cuts(length: int) -> list[list[int]]:
    """Every way to cut so many tokens in parts."""
    if not length:
        return [[]]
    return [[first, *rest] for first in range(1, length + 1) for rest in cuts(length - first)]


@settings(max_examples=60, deadline=None)
@given(drawn=batches())
def test_a_sample_that_is_split_changes_no_advantage(drawn: Any) -> None:
    samples, sizes, fields, chosen, split = drawn
    parted = [*samples[:chosen], split, *samples[chosen + 1 :]]
    apart = []
    for name in set(ESTIMATOR.built_in_names()) - {"dpo"}:  # whose samples are pairs
        before, after = (advantages(one, sizes, fields, name) for one in (samples, parted))
        if not all(np.allclose(other, one, atol=1e-5, rtol=1e-7) for one, other in zip(before, after, strict=True)):
            apart.append((name, before, after))
    assert apart == []


@cases(("name", "roles"), product(("grpo", "rloo"), (None, "solver")))
def test_failures_that_went_through_many_trajectories_are_failures_like_others(name: str, roles: str | None) -> None:
    """Rewards 1 1 0 0, given by `episode` to every trajectory of a sample; each failure has nine of them."""
    counts, rewards = [1, 1, 9, 9], [1.0, 1.0, 0.0, 0.0]
    samples = [
        Written([1] * n, [r] * n if n > 1 else None, roles and [roles] * n, r)  # type: ignore[list-item]
        for n, r in zip(counts, rewards, strict=True)
    ]
    fields = {
        "masks": [np.ones(n, np.uint8) for n in counts],
        "values": [np.zeros(n, np.float32) for n in counts],
        "turns": [[1] * n for n in counts],
    }
    found = [float(own.mean()) for own in advantages(samples, [4], fields, name)]
    each = {"rloo": 2 / 3, "grpo": 0.5 / np.std(rewards, ddof=1)}[name]
    assert found == pytest.approx([each, each, -each, -each], rel=1e-4)


def test_every_token_comes_back_to_its_place_where_what_is_one_does_not_lie_together() -> None:
    sample = Written([2, 1, 3], [1.0, 0.0, 1.0], None, 1.0)
    batch = ScoredBatch(np.array([1.0, 0.0], np.float32), [2], [np.ones(6, np.uint8), np.ones(1, np.uint8)])
    episodes = Episodes([sample.lengths, None], [sample.rewards, None], [None] * 2, [None] * 2, [None] * 2)
    units = compared(batch, episodes)
    assert units.batch.rewards.tolist() == [1, 0, 0]
    values = [np.array([0, 1, 3, 4, 5]), np.array([2]), np.array([6])]
    assert [own.tolist() for own in units.of_samples(values)] == [[0, 1, 2, 3, 4, 5], [6]]
    roles = replace(episodes, roles=[["a", "b", "a"], ["a"]])
    assert roles.role_rewards([1.0, 0.0]) == {"a": 0.5, "b": 0.0}
