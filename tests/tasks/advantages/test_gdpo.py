"""Several rewards, normalised apart: against the paper's formula, and in a run whose grader forgets one of them."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cairn.configs.errors import ConfigError
from cairn.configs.loader import parse
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.advantages import step as estimators
from cairn.tasks.advantages.batch import ScoredBatch
from cairn.tasks.batch.batch import arrays
from cairn.tasks.grading.shaping import with_rewards
from cairn.tasks.rewards.grader import Graded
from tests.mistakes import mistakes
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

Groups = list[list[dict[str, float]]]
"""The rewards of each sample, by their names, group after group."""


def by_the_paper(groups: Groups, weights: dict[str, float]) -> list[float]:
    """The advantage of each sample: section 3."""

    def spread(values: list[float]) -> tuple[list[float], float]:
        mean = math.fsum(values) / len(values)
        distances = [value - mean for value in values]
        return distances, math.fsum(distance**2 for distance in distances) / max(len(values) - 1, 1)

    def normalised(values: list[float]) -> list[float]:
        distances, variance = spread(values)
        return [distance / (math.sqrt(variance) + 1e-6) for distance in distances]

    sums: list[float] = []
    for group in groups:
        apart = [[w * a for a in normalised([rewards[k] for rewards in group])] for k, w in weights.items()]
        sums += [math.fsum(own) for own in zip(*apart, strict=True)]
    distances, variance = spread(sums)
    return [distance / math.sqrt(variance + 1e-8) for distance in distances]


def estimated(groups: Groups, weights: dict[str, float], lengths: list[int] | None = None) -> list[float]:
    samples = [rewards for group in groups for rewards in group]
    masks = [np.ones(length, np.uint8) for length in lengths or [1] * len(samples)]
    config = AlgorithmConfig(
        advantage_estimator="gdpo", gdpo_reward_keys=tuple(weights), gdpo_reward_weights=tuple(weights.values())
    )
    batch = ScoredBatch(np.zeros(len(samples), np.float32), list(map(len, groups)), masks, components=samples)
    found, returns = estimators.estimate(batch, config)
    assert all(own.tolist() == other.tolist() for own, other in zip(found, returns, strict=True))
    return [float(own[0]) for own in found]


rewards = st.fixed_dictionaries({"right": st.sampled_from([0.0, 1.0]), "brief": st.sampled_from([-0.5, 0.1, 0.3, 9.0])})


@settings(deadline=None)
@given(
    st.lists(st.lists(rewards, min_size=1, max_size=5), min_size=1, max_size=4),
    st.sampled_from([1.0, 0.25]),
    st.integers(2, 1000),
    st.data(),
)
def test_advantages_are_the_paper_s_whatever_the_scale_of_a_reward_and_the_length_of_a_sample(
    groups: Groups, weight: float, scale: int, data: st.DataObject
) -> None:
    weights = {"right": 1.0, "brief": weight}
    expected = by_the_paper(groups, weights)
    count = len(expected)
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    assert estimated(groups, weights, lengths) == pytest.approx(expected, abs=1e-4)
    scaled = [[own | {"brief": scale * own["brief"]} for own in group] for group in groups]
    if all(max(map(abs, apart)) > 0.5 for apart in (expected, by_the_paper(scaled, weights))):
        # Where all rewards cancel, the 1e-6 beside standard deviations is what is left.
        assert estimated(scaled, weights) == pytest.approx(expected, abs=1e-3)


def test_samples_that_a_sum_of_rewards_makes_equal_are_told_apart() -> None:
    """The paper's example: of two groups, one earned one of two rewards more than the other, and the other both."""
    one, both = {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}
    found = estimated([[{"a": 0.0, "b": 0.0}, one], [{"a": 0.0, "b": 0.0}, both]], {"a": 1.0, "b": 1.0})
    assert found[3] == pytest.approx(2 * found[1])


def test_a_run_learns_from_what_its_grader_gives_and_a_sample_that_lacks_a_reward_fails(
    tiny_assets: Path, tmp_path: Path
) -> None:
    (tmp_path / "two.py").write_text(
        "def grade(response, label, metadata):\n"
        "    low = sum(ord(char) % 3 for char in response)\n"
        "    given = {'reward': 0.5, 'low': low, 'even': len(response) % 2 == 0}\n"
        "    return {**given, 'low': [low]} if int(label) % 2 else given\n"
    )
    keys, weights = ("low", "even", "overlong_penalty"), (1.0, 0.5, 2.0)
    config = tiny_config(
        tiny_assets,
        reward={"custom_rm_path": f"{tmp_path}/two.py:grade", "overlong_buffer_len": 4},
        algorithm={
            "advantage_estimator": "gdpo",
            "gdpo_reward_keys": keys,
            "gdpo_reward_weights": weights,
            "use_rollout_logprobs": True,
        },
        rollout={"num_rollout": 1, "max_refill_rounds": 8},
    )
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        commits = run.ledger.commits(0)
        graded = [row for commit in commits if commit.step is Step.REWARD for row in run.read(commit).to_pylist()]
        table = run.read(run.committed(0, Step.ADVANTAGE))
    failed = [row for row in graded if row["reward"] is None]
    assert failed, "the witness that a grader forgot one"
    assert all("as 'low' with the reward, but algorithm.gdpo_reward_keys names 'low'" in r["error"] for r in failed)
    components = {(row["group_id"], row["sample_index"]): json.loads(row["components"]) for row in graded}
    groups: dict[int, list[dict[str, float]]] = {}
    for row in table.select(["group_id", "sample_index"]).to_pylist():
        groups.setdefault(row["group_id"], []).append(components[row["group_id"], row["sample_index"]])
    expected = by_the_paper(list(groups.values()), dict(zip(keys, weights, strict=True)))
    assert len({round(value, 3) for value in expected}) > 2
    assert [own[0] for own in arrays(table, "advantages")] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("value", [None, "1", [1.0], 1e39, 10**400])
def test_what_is_no_number_is_no_reward(value: object) -> None:
    found = with_rewards(Graded(1.0, {"low": value}), ["reward", "low"], "g.py:grade")
    assert found.reward is None
    assert found.error is not None
    assert found.error.startswith("the grader 'g.py:grade' returned ")
    assert with_rewards(Graded(1.0, {"low": True}), ["reward", "low"], "g.py:grade").reward == 1.0
    none = with_rewards(Graded(1.0, {"high": 2}), ["low"], "g.py:grade").error
    assert none is not None
    assert none.startswith("the grader 'g.py:grade' returned no 'low', but 'high' with the reward")


def test_samples_that_were_graded_before_a_reward_was_named_are_told_in_a_sentence() -> None:
    with pytest.raises(BadPlugin, match="needs the reward 'b' of gdpo_reward_keys, but 2 of 2 samples were graded"):
        estimated([[{"a": 1.0}, {"a": 0.0}]], {"a": 1.0, "b": 1.0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage_estimator": "gdpo"}, "gdpo_reward_keys names none"),
        (
            {"gdpo_reward_keys": ["a"]},
            "has no effect while algorithm.advantage_estimator is grpo; set algorithm.advantage_estimator=gdpo",
        ),
        ({"advantage_estimator": "gdpo", "gdpo_reward_keys": ["a", "a"]}, "names a reward twice"),
        (
            {"advantage_estimator": "gdpo", "gdpo_reward_keys": ["a"], "gdpo_reward_weights": [1, 2]},
            "gdpo_reward_weights has 2 numbers and gdpo_reward_keys 1 names",
        ),
        ({"advantage_estimator": "gdpo", "gdpo_reward_keys": ["a"], "kl_coef": 0.1}, "kl_coef .* has no effect"),
    ],
)
def test_options_without_effect_or_sense_are_said(options: dict[str, object], message: str) -> None:
    assert re.search(message, mistakes(algorithm=options))


def test_a_recipe_names_rewards_and_numbers_and_nothing_else(tiny_assets: Path) -> None:
    algorithm = {"advantage_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1, 0.5]}
    config = tiny_config(tiny_assets, algorithm=algorithm)
    assert parse(config.model_dump(mode="json")) == config
    for name, value in (("gdpo_reward_keys", [1, 2]), ("gdpo_reward_weights", [True, 1]), ("gdpo_reward_keys", "ab")):
        with pytest.raises(ConfigError, match=name):
            parse({**config.model_dump(mode="json"), "algorithm": algorithm | {name: value}})


def test_what_length_costs_is_named_or_refused(tiny_assets: Path) -> None:
    algorithm = {"advantage_estimator": "gdpo", "gdpo_reward_keys": ["low"]}
    with pytest.raises(ValidationError, match="names neither reward nor overlong_penalty"):
        tiny_config(tiny_assets, reward={"overlong_buffer_len": 4}, algorithm=algorithm)
