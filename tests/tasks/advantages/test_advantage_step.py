"""The advantage step over snapshots: groups are found by their ids, whatever else lies beside them in the shards."""

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.schemas import FILTER, REWARD, rollout_schema
from cairn.tasks.advantages.batch import ScoredBatch, normalise
from cairn.tasks.advantages.step import estimated
from cairn.tasks.batch.batch import arrays, trained_shards
from cairn.tasks.durable.recorded_run import RecordedRun
from tests.flows import written_runs
from tests.storage.builders import commit_step
from tests.tasks.advantages.test_estimators import algorithm, looped

SHARDS = ("00-000", "00-001")
NAMES = count()


@dataclass
class Drawn:
    """A sample: tokens of each of its trajectories, and which are trained on."""

    group: int
    index: int
    trajectories: list[int]
    mask: list[int]
    reward: float | None
    """None: it failed."""


@dataclass
class Group:
    """Where it lies, and what becomes of it."""

    id: int
    shard: str
    disposition: str
    samples: list[Drawn]


@st.composite
def drawn_groups(draw: st.DrawFn) -> list[Group]:
    found = []
    for index in range(draw(st.integers(1, 5))):
        disposition = "train" if index == 0 else draw(st.sampled_from(["train", "train", "drop", "buffer"]))
        group = Group(7 * index + 1, draw(st.sampled_from(SHARDS)), disposition, [])
        for sample in range(draw(st.integers(1, 4))):
            trajectories = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
            mask = draw(st.lists(st.integers(0, 1), min_size=sum(trajectories), max_size=sum(trajectories)))
            failed = disposition == "drop" and draw(st.booleans())
            reward = None if failed else draw(st.sampled_from([0.0, 0.5, 1.0]))
            group.samples.append(Drawn(group.id, sample, trajectories, mask, reward))
        found.append(group)
    order = draw(st.permutations(range(len(found))))
    return [found[index] for index in order]  # as the filter step has them, and the batch


def snapshots(store: str, groups: list[Group]) -> RecordedRun:
    """A run whose iteration 0 has rolled out, graded and filtered them."""
    ledger = written_runs.new_run(store, f"drawn{next(NAMES)}")
    template = written_runs.rollout_table(0, (0,), 0).to_pylist()[0]
    commits = []
    for shard in SHARDS:
        lying = sorted((group for group in groups if group.shard == shard), key=lambda group: group.id)
        samples = [sample for group in lying for sample in group.samples]
        keys = [{"group_id": sample.group, "sample_index": sample.index} for sample in samples]
        rolled = [
            template | key | {"trajectories": one.trajectories, "loss_mask": one.mask}
            | {"response_ids": [7] * len(one.mask), "log_probs": [-0.5 * trained for trained in one.mask]}
            | {"weight_versions": [0] * len(one.mask)}
            for key, one in zip(keys, samples, strict=True)
        ]  # fmt: skip
        graded = [
            key | {"reward": one.reward, "grader": "g", "grader_version": "1"}
            | {"status": "completed" if one.reward is not None else "failed"}
            for key, one in zip(keys, samples, strict=True)
        ]  # fmt: skip
        rollout = pa.Table.from_pylist(rolled, rollout_schema(cut=False, several=True))
        commits.append(commit_step(ledger, 0, Step.ROLLOUT, shard, table=rollout))
        commits.append(commit_step(ledger, 0, Step.REWARD, shard, table=pa.Table.from_pylist(graded, REWARD)))
    rows: list[dict[str, Any]] = [
        {"group_id": group.id, "iteration": 0, "shard": group.shard, "kept": group.disposition != "drop"}
        | {"disposition": group.disposition}
        for group in groups
    ]
    filtered = pa.Table.from_pylist(rows, FILTER)
    commit_step(ledger, 0, Step.FILTER, "00", inputs=tuple(commits), table=filtered, values={"full": True})
    return RecordedRun(written_runs.config_of(ledger), ledger)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=drawn_groups())
def test_a_sample_has_one_reward_and_one_place_in_its_group_whatever_is_filtered_and_however_many_trajectories_it_has(
    name: str, tmp_path: Path, groups: list[Group]
) -> None:
    trained = [group for group in groups if group.disposition == "train"]
    samples = [sample for group in trained for sample in group.samples]
    assume(any(any(sample.mask) for sample in samples))
    masks = [np.array(sample.mask, np.uint8) for sample in samples]
    batch = ScoredBatch(
        np.array([sample.reward for sample in samples], np.float32),
        [len(group.samples) for group in trained],
        masks,
        values=[np.zeros(len(mask)) for mask in masks],
        kl=[np.zeros(len(mask)) for mask in masks],
        truncated=np.zeros(len(masks), bool),
    )
    config = algorithm(name)
    expected = []
    for mask, values in zip(masks, looped(batch, config), strict=True):
        expected.append(np.zeros(len(mask), np.float32))
        expected[-1][mask == 1] = values
    if config.normalize_advantages:
        expected = normalise(expected, masks)

    run = snapshots(str(tmp_path), groups)
    selection = run.committed(0, Step.FILTER, "00")
    table, metrics = estimated(run, config, selection, *trained_shards(run, selection), None)
    keys = list(zip(table["group_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True))
    assert keys == [(sample.group, sample.index) for sample in samples]
    assert table["reward"].to_pylist() == [sample.reward for sample in samples]
    for found, values, mask in zip(arrays(table, "advantages"), expected, masks, strict=True):
        np.testing.assert_allclose(found[mask == 1], values[mask == 1], rtol=1e-4, atol=2e-6)
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["rollout_log_probs"] == -0.5, "of trained tokens alone"
    chosen = np.concatenate(arrays(table, "advantages"))[np.concatenate(masks) == 1]
    assert metrics["advantages"] == pytest.approx(chosen.mean(), abs=1e-6)
