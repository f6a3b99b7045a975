"""Tokens of a stream that are too old all the same: what a policy says of them is decided once, by the filter step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.run import RunConfig
from cairn.engines.types.trajectories import FIRST_CALL, GeneratedSample, Segment, Trajectory
from cairn.engines.types.types import FinishReason
from cairn.flows.history.replay import Replaying
from cairn.flows.reading.metrics import iteration_metrics
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.opening import open_store
from cairn.tasks.advantages.step import advantage
from cairn.tasks.batch.source import train_batch
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.step import StepCall
from cairn.tasks.generation.groups import Group
from cairn.tasks.grading.reward import reward
from cairn.tasks.selecting.filter import filter_groups
from cairn.tasks.selecting.staleness import stale_weights
from cairn.tasks.streaming.stream import Stream, admit, admitted_groups
from cairn.tasks.streaming.take import take_groups
from tests.flows.test_streaming import logs_of, streaming
from tests.local_fleet import LocalFleet
from tests.tiny_run import tiny_context

ITERATION, MAX_AGE = 4, 1


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    return streaming(tiny_assets, MAX_AGE)


@pytest.fixture(scope="module")
def fleet(config: RunConfig) -> LocalFleet:
    return LocalFleet(config)


def sampled(group: Group, versions: list[int]) -> Group:
    """Its samples have ended, each with other tokens, which were sampled from these weights."""
    parts = {}
    for index in range(len(group.seeds)):
        tokens = np.arange(5 + index, 5 + index + len(versions), dtype=np.int32)
        mask, log_probs = np.ones(len(versions), np.uint8), np.zeros(len(versions), np.float32)
        made = Segment(tokens, mask, FIRST_CALL, log_probs, np.asarray(versions, np.int32), 1, FinishReason.STOP)
        parts[index] = GeneratedSample(group.prompt.group_id, index, Trajectory((made,)), FinishReason.STOP)
    return replace(group, parts=parts)


def selected(run: RunContext) -> tuple[Commit, Commit, Commit]:
    """Two groups are taken from a stream, graded and selected: one is young, the other one has tokens of the ages 0 to
    3."""
    admission = admit(run, ITERATION, "00", None, count=2)
    attempt = run.ledger.attempt(ITERATION, Step.ROLLOUT, "stream")
    stream = Stream(StepCall(run, ITERATION, "stream", attempt, "inputs"), None, logs_of(run), ())
    run.attach(stream)
    young, old = admitted_groups(run, admission)
    stream.admit(admission, [sampled(young, [3, 4]), sampled(old, [1, 2, 3, 4])])
    taken = take_groups(run, ITERATION, "00-000", [], count=2)
    graded = reward(run, ITERATION, "00-000", taken)
    return filter_groups(run, ITERATION, "00", None, [taken], [graded], round=0), taken, graded


def learned(run: RunContext) -> tuple[Commit, list[np.ndarray], list[np.ndarray]]:
    """The filter step; loss masks and advantages of the samples of the old group."""
    selection, taken, graded = selected(run)
    made = advantage(run, ITERATION, None, selection, [taken], [graded], None)
    batch = train_batch(run, selection, [taken], made)
    own = [place for place, group in enumerate(batch.groups) if group == 1]
    assert batch.advantages is not None
    scratch = Replaying(run, {Step.FILTER, Step.ADVANTAGE}, None, open_store(f"{run.ledger.store.url}-again"))
    scratch.call(filter_groups, ITERATION, "00", None, [taken], [graded], round=0)
    scratch.call(advantage, ITERATION, None, selection, [taken], [graded], None)
    assert [replayed.differences for replayed in scratch.replayed] == [(), ()]
    return selection, [batch.loss_mask[place] for place in own], [batch.advantages[place] for place in own]


@pytest.fixture
def opened(config: RunConfig, fleet: LocalFleet, tmp_path: Path) -> Callable[[str], Any]:
    def opens(policy: str) -> Any:
        rollout = config.rollout.model_copy(update={"staleness_policy": policy})
        changed = config.model_copy(update={"rollout": rollout})
        return tiny_context(str(tmp_path / "store"), changed, f"run-{abs(hash(policy))}", fleet=fleet)

    return opens


def test_tokens_that_are_too_old_are_masked_or_count_less_and_are_counted_by_prompt(
    opened: Callable[[str], Any],
) -> None:
    with opened("mask") as (run, _):
        masked, masks, whole = learned(run)
        assert [mask.tolist() for mask in masks] == [[0, 0, 1, 1]] * 4
        assert all(len(set(own.tolist())) == 1 for own in whole)
        assert any(own.any() for own in whole)
    with opened("decay") as (run, _):
        weighed, masks, less = learned(run)
        assert [mask.tolist() for mask in masks] == [[1, 1, 1, 1]] * 4
        for one, other in zip(less, whole, strict=True):
            np.testing.assert_allclose(one, other * np.asarray([1 / 3, 1 / 2, 1, 1]), rtol=1e-6)
        rows = {row["group_id"]: row for row in run.read(weighed).to_pylist()}
        assert rows[1]["stale_weights"] == pytest.approx([1 / 2, 1 / 3])
        assert rows[0]["stale_weights"] is None
        shown = iteration_metrics([weighed, run.committed(ITERATION, Step.ADVANTAGE)], run.config)
        assert (shown["age/down_weighted_tokens"], shown["age/masked_tokens"], shown["age/stale_tokens"]) == (8, 0, 8)
    assert masked.metrics["age/stale_tokens"] == 8


def test_a_group_that_is_dropped_for_its_age_is_replaced_and_counted(opened: Callable[[str], Any]) -> None:
    with opened("drop") as (run, _):
        selection, *_ = selected(run)
        rows = {row["group_id"]: row for row in run.read(selection).to_pylist()}
        assert (rows[0]["disposition"], rows[0]["stale_tokens"]) == ("train", None)
        assert (rows[1]["disposition"], rows[1]["reason"], rows[1]["stale_tokens"]) == ("drop", "too_old", 8)
        assert selection.values["missing"] == 1
        assert selection.metrics["age/dropped_groups"] == 1


def test_what_is_no_weight_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def weigh(tokens, max_age):\n    return {2: 0.5, 3: 1.5}\n")
    with pytest.raises(BadPlugin, match=r"a weight from 0 to 1 for each age above 1 \(2, 3\), or None"):
        stale_weights(f"{tmp_path}/bad.py:weigh", {0: 4, 2: 1, 3: 1}, 1)
    assert stale_weights("decay", {0: 4, 3: 1}, 1) == (0.0, 1 / 3), "no token is of age 2"
