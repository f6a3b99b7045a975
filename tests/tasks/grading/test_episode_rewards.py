"""Rewards that the code of samples gives: from there into tables, to graders, and into advantages by role."""

import json
from pathlib import Path

import numpy as np
import pytest

from cairn.configs.schema.run import RunConfig
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.durable.context import RunContext
from cairn.tasks.grading.shaping import with_own_rewards
from cairn.tasks.rewards import episode
from cairn.tasks.rewards.grader import Graded
from cairn.tasks.rewards.sample import ResponseSegment, Sample
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

CODE = """
import asyncio
from dataclasses import replace

from cairn import Segment, Trajectory


def worth(segment):
    return float(sum(segment.ids.tolist()) % 7)


async def generate(ctx, sample):
    solved = await asyncio.gather(*(ctx.sample(sample.prompt_ids, max_new_tokens=4) for _ in range(2)))
    solvers = [Trajectory([one], reward=worth(one), role="solver") for one in solved]
    read = Segment.given(solved[0].ids)
    one = await ctx.sample([*sample.prompt_ids, *read.ids], max_new_tokens=3)
    other = await ctx.sample([*sample.prompt_ids, *read.ids, *one.ids, 7, 8], max_new_tokens=2)
    turns = [read, replace(one, reward=worth(one)), Segment.given([7, 8]), replace(other, reward=worth(other))]
    return [*solvers, Trajectory(turns, role="selector")]
"""
GRADER = """
def grade(samples):
    assert all(sample.roles == ("solver", "solver", "selector") for sample in samples)
    for sample in samples:
        turns = [segment.reward for segment in sample.segments]
        assert turns[:3] == [None] * 3 and turns[4] is None
        assert sample.rewards[2] == turns[3] + turns[5]
    best = max(max(sample.rewards[:2]) for sample in samples)
    return [
        {"reward": sample.rewards[2], "trajectory_rewards": [reward - best for reward in sample.rewards]}
        for sample in samples
    ]
"""


@pytest.fixture
def config(tiny_assets: Path, tmp_path: Path) -> RunConfig:
    (tmp_path / "agents.py").write_text(CODE)
    (tmp_path / "group.py").write_text(GRADER)
    return tiny_config(
        tiny_assets,
        rollout={"custom_generate_function_path": f"{tmp_path / 'agents.py'}:generate", "num_rollout": 1},
        reward={"custom_rm_path": None, "rm_type": "episode"},
        algorithm={"grpo_std_normalization": False},
        training={"lr": 1e-3, "num_threads": 1},
    )


def tables(run: RunContext) -> list[dict]:
    """Rows of the samples that were trained on."""
    found: dict[tuple[int, int], dict] = {}
    for step, shard in ((Step.ROLLOUT, "00-000"), (Step.REWARD, "00-000"), (Step.ADVANTAGE, None)):
        for row in run.read(run.committed(0, step, shard)).to_pylist():
            found.setdefault((row["group_id"], row["sample_index"]), {}).update({step: row})
    return list(found.values())


def check_advantages(run: RunContext, rows: list[dict]) -> None:
    """A trajectory's own reward less the mean of those of its role in its group."""
    solvers, selectors = ({row[Step.REWARD]["group_id"]: [] for row in rows} for _ in range(2))
    for row in rows:
        *solved, selected = row[Step.REWARD]["trajectory_rewards"]
        solvers[row[Step.REWARD]["group_id"]] += solved
        selectors[row[Step.REWARD]["group_id"]] += [selected]
    assert {len(own) for own in solvers.values()} == {8}
    for row in rows:
        group, advantages = row[Step.REWARD]["group_id"], np.array(row[Step.ADVANTAGE]["advantages"])
        parts = np.split(advantages, np.cumsum(row[Step.ROLLOUT]["trajectories"])[:-1])
        baselines = [np.mean(solvers[group])] * 2 + [np.mean(selectors[group])]
        for part, reward, baseline in zip(parts, row[Step.REWARD]["trajectory_rewards"], baselines, strict=True):
            np.testing.assert_allclose(part, reward - baseline, atol=1e-5)
    metrics = run.committed(0, Step.ADVANTAGE).metrics
    for name, rewards in (("solver", solvers), ("selector", selectors)):
        mean = np.mean([reward for own in rewards.values() for reward in own])
        assert metrics[f"role/{name}/reward"] == pytest.approx(mean, abs=1e-5)
    assert (metrics["turns/mean"], metrics["turns/max"]) == (4.0, 4)


def test_each_trajectory_learns_from_its_own_reward_against_those_of_its_role(
    config: RunConfig, tmp_path: Path
) -> None:
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        rows = tables(run)
        assert len(rows) == 16
        for row in rows:
            rolled, ids = row[Step.ROLLOUT], row[Step.ROLLOUT]["response_ids"]
            ends = np.cumsum([segment["tokens"] for segment in rolled["segments"]])
            first, second, _, one, _, other = (float(sum(part)) % 7 for part in np.split(ids, ends[:-1]))
            assert (
                rolled["trajectory_rewards"] == row[Step.REWARD]["trajectory_rewards"] == [first, second, one + other]
            )
            assert rolled["turn_rewards"] == [None, None, None, one, None, other]
            assert rolled["trajectory_roles"] == ["solver", "solver", "selector"]
            assert row[Step.REWARD]["reward"] == one + other
        check_advantages(run, rows)


def test_a_grader_of_groups_sees_them_and_may_give_others(config: RunConfig, tmp_path: Path) -> None:
    reward = config.reward.model_copy(update={"custom_rm_path": f"{tmp_path / 'group.py'}:grade", "group_rm": True})
    with tiny_context(str(tmp_path / "store"), config.model_copy(update={"reward": reward})) as (run, _):
        iteration(run, DirectSteps(run), 0)
        rows = tables(run)
        for row in rows:
            returned, own = row[Step.ROLLOUT]["trajectory_rewards"], row[Step.REWARD]["trajectory_rewards"]
            assert len({round(one - two, 6) for one, two in zip(returned, own, strict=True)}) == 1
            assert row[Step.REWARD]["components"] is None
        check_advantages(run, rows)


def test_a_sample_without_a_reward_is_failed_by_name_and_one_trajectory_without_has_the_last_ones() -> None:
    for rewards in ((), (None,), (1.0, None)):
        with pytest.raises(ValueError, match="generate set no reward"):
            episode.grade(Sample("", None, rewards=rewards))
    assert episode.grade(Sample("", None, rewards=(0.0,))) == {"reward": 0.0}
    assert episode.grade(Sample("", None, rewards=(None, 2.0)))["trajectory_rewards"] == [2.0, 2.0]


@pytest.mark.parametrize("returned", [[1.0], [1.0, float("nan")], [1.0, "one"], 3, None])
def test_rewards_of_trajectories_that_are_no_numbers_or_too_few_fail_the_sample(returned: object) -> None:
    graded, own = with_own_rewards(Graded(1.0, {"trajectory_rewards": returned}), 2)
    assert (graded.reward, own) == (None, None)
    assert graded.error == (
        f"the grader returned {returned!r} as trajectory_rewards of 2 trajectories: "
        "let it return a list with one number for each"
    )


def test_answers_that_were_kept_before_there_were_rewards_are_found_again() -> None:
    from cairn.tasks.grading.opening import _hashed_fields

    segments = (ResponseSegment((1,), "a", True), ResponseSegment((2,), "b", False, 1))
    seen = _hashed_fields(Sample("a", "1", segments=segments))
    assert not {"rewards", "roles"} & set(seen)
    assert [set(segment) for segment in seen["segments"]] == [{"ids", "text", "sampled", "trajectory"}] * 2
    with_rewards = _hashed_fields(Sample("a", "1", segments=segments, rewards=(1.0,)))
    assert json.dumps(with_rewards) != json.dumps(seen)
