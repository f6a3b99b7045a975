"""What over-sampling leaves over is trained on no later than `max_age` allows, and its age is known."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.run import RunConfig
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Parent
from cairn.storage.ledger.schemas import Disposition
from cairn.tasks.batch.batch import trained_shards
from cairn.tasks.batch.source import train_batch
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.selection import last_selection, number, trained_groups
from cairn.tasks.durable.versions import sampled_from, token_ages, weight_version_after
from cairn.tasks.selecting.buffers import get_policy
from cairn.tasks.selecting.buffers.group import JudgedGroup
from cairn.tasks.selecting.filter import fill_batch
from cairn.tasks.trainer.recovery import restore_trainer
from tests.flows.written_runs import new_run
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

GRADER = """
def grade(response, label, metadata):
    if int(label) in {ungraded}:
        raise RuntimeError("no judge today")
    return float(len(response) % 5)
"""


def over_sampling(assets: Path, tmp_path: Path, ungraded: Sequence[int] = (), **rollout: Any) -> RunConfig:
    """2 groups of 2 are trained on; groups of these numbers fail."""
    (tmp_path / "judge.py").write_text(GRADER.replace("{ungraded}", str(tuple(ungraded))))
    base = {"num_rollout": 4, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 6}
    return tiny_config(
        assets,
        data={"path": str(assets / "train.jsonl"), "rollout_shuffle": False},
        rollout=base | rollout,
        reward={"custom_rm_path": f"{tmp_path / 'judge.py'}:grade"},
    )


def go(run: RunContext, iterations: int) -> list[list[int]]:
    """The groups that each iteration trained on."""
    for index in range(iterations):
        iteration(run, DirectSteps(run), index)
    return [[group for _, _, group in trained_groups(run, last_selection(run, i))] for i in range(iterations)]


def age_metrics(run: RunContext, index: int) -> tuple[float, float, float]:
    """Mean and maximum of an iteration, and how many groups it dropped for their age."""
    estimated, selection = run.committed(index, Step.ADVANTAGE), last_selection(run, index)
    return estimated.metrics["age/mean"], estimated.metrics["age/max"], selection.metrics["age/dropped_groups"]


def test_by_default_every_token_is_of_the_newest_weights_however_much_is_left_over(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = over_sampling(tiny_assets, tmp_path, over_sampling_batch_size=4)
    with tiny_context(str(tmp_path), config) as (run, _):
        assert go(run, 3) == [[0, 1], [4, 5], [8, 9]]
        for index in range(3):
            assert age_metrics(run, index) == (0, 0, 2)
            rows = run.read(last_selection(run, index)).to_pylist()
            assert [row["reason"] for row in rows] == [None, None, "surplus", "surplus"]
            assert not any(name.startswith("dynamic_filter") for name in last_selection(run, index).metrics)


def test_a_larger_bound_takes_older_groups_where_fresh_ones_are_too_few(tiny_assets: Path, tmp_path: Path) -> None:
    """3 are drawn for 2: group 2 waits; of 3 and 4 one fails; then nothing waits, and 3 are drawn again."""
    config = over_sampling(tiny_assets, tmp_path, [3], over_sampling_batch_size=3, max_age=1)
    with tiny_context(str(tmp_path), config) as (run, _):
        assert go(run, 3) == [[0, 1], [4, 2], [5, 6]]
        assert number(last_selection(run, 1), "cursor") == 5
        estimated = run.read(run.committed(1, Step.ADVANTAGE)).to_pylist()
        for row in estimated:
            assert row["ages"] == [int(row["group_id"] == 2)] * len(row["advantages"])
        tokens = {group: sum(len(r["ages"]) for r in estimated if r["group_id"] == group) for group in (2, 4)}
        mean, most, dropped = age_metrics(run, 1)
        assert (mean, most, dropped) == (pytest.approx(tokens[2] / (tokens[2] + tokens[4])), 1, 0)
        assert age_metrics(run, 2) == (0, 0, 0)


@pytest.mark.parametrize(("max_age", "trained"), [(None, [12, 13]), (2, [10, 9])])
def test_a_lag_counts_to_the_age_of_what_waits(
    max_age: int | None, trained: list[int], tiny_assets: Path, tmp_path: Path
) -> None:
    """What iteration 3 leaves over is of age 1 there, and 2 in iteration 4, where group 11 fails."""
    lagged: dict[str, Any] = {"pipeline": "lagged", "lag": 1, "max_age": max_age}
    config = over_sampling(tiny_assets, tmp_path, [11], num_rollout=5, over_sampling_batch_size=3, **lagged)
    with tiny_context(str(tmp_path), config) as (run, _):
        assert go(run, 5)[4] == trained
        for index in range(5):
            selection = last_selection(run, index)
            batch = train_batch(run, selection, trained_shards(run, selection)[0])
            assert all(mask.all() for mask in batch.loss_mask), "of what is trained on, some is too old"
            ages = {row["group_id"]: row["age"] for row in run.read(selection).to_pylist()}
            for row in run.read(run.committed(index, Step.ADVANTAGE)).to_pylist():
                assert set(row["ages"]) == {ages[row["group_id"]]}


def test_what_waits_is_dropped_when_the_next_iteration_could_not_use_it(tiny_assets: Path, tmp_path: Path) -> None:
    """Everything is kept: the second iteration draws 4 - 2 fresh groups and trains on them; the 2 that waited go."""
    config = over_sampling(tiny_assets, tmp_path, over_sampling_batch_size=4, max_age=1)
    with tiny_context(str(tmp_path), config) as (run, _):
        assert go(run, 3) == [[0, 1], [4, 5], [6, 7]]
        assert [number(last_selection(run, index), "buffered") for index in range(3)] == [2, 0, 2]
        assert [age_metrics(run, index) for index in range(3)] == [(0, 0, 0), (0, 0, 2), (0, 0, 0)]


def test_a_train_step_is_replayed_with_the_bound_that_its_batch_was_cut_with(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = over_sampling(tiny_assets, tmp_path, [3], over_sampling_batch_size=3, max_age=1)
    with tiny_context(str(tmp_path), config) as (run, _):
        go(run, 2)
        digests = train_digests(run, range(2))
    with tiny_context(str(tmp_path), config) as (run, _):
        monkeypatch.setattr("cairn.configs.schema.rollout.RolloutConfig.oldest_trained", 0)
        restore_trainer(run, run.committed(1, Step.TRAIN))  # raises where a digest differs
        assert train_digests(run, range(2)) == digests


def group(id: int, age: int, max_age: int | None, *, kept: bool = True, **fields: Any) -> JudgedGroup:
    return JudgedGroup(id, 10 - age, "00-000", None, None, None, kept=kept, age=age, max_age=max_age, **fields)


def test_the_youngest_kept_groups_make_the_batch_and_the_rest_waits_until_it_is_too_old() -> None:
    groups = [
        group(0, 3, 2),
        group(1, 2, 2),
        group(2, 1, 2),
        group(3, 1, 2, kept=False, unfinished=True),
        group(4, 0, 2),
        group(5, 0, 2, kept=False, spare=True),
        group(6, 0, 2),
        group(7, 4, None),  # left by a step that set no bound
    ]

    def fates(size: int, use_spare: bool = False) -> list[tuple[int, Disposition, str | None]]:
        filled = fill_batch(groups, size, order=get_policy("youngest_first"), use_spare=use_spare, max_age=2)
        return [(one.group_id, one.disposition, one.reason) for one in filled]

    train, waits, drop = Disposition.TRAIN, Disposition.BUFFER, Disposition.DROP
    unfinished = (3, Disposition.CONTINUE, None)
    assert fates(1) == [
        (4, train, None), (0, drop, "too_old"), (1, drop, "surplus"), (2, waits, None), unfinished, (5, drop, None),
        (6, waits, None), (7, drop, "surplus"),
    ]  # fmt: skip
    assert [fate for fate in fates(9) if fate[1] is train] == [(id, train, None) for id in (4, 6, 2, 1, 7)]
    assert [fate[0] for fate in fates(9, use_spare=True) if fate[1] is train] == [4, 6, 2, 1, 7, 5]


def test_a_policy_of_ones_own_says_who_is_trained_on_and_who_goes_on_first(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def order(groups):\n    return groups[::-1]\n")
    order = get_policy(f"{tmp_path / 'mine.py'}:order")
    waiting = [group(id, 1, 2, kept=False, unfinished=True) for id in (5, 6)]
    groups = [group(0, 2, 2), waiting[0], group(1, 1, 2), group(2, 3, 2), group(3, 0, 2), waiting[1]]
    filled = fill_batch(groups, 2, order=order, use_spare=False, max_age=2)
    fates = {fate: [one.group_id for one in filled if one.disposition is fate] for fate in Disposition}
    assert fates == {
        Disposition.TRAIN: [3, 1], Disposition.CONTINUE: [6, 5], Disposition.BUFFER: [], Disposition.DROP: [0, 2]
    }  # fmt: skip


@pytest.mark.parametrize("returned", ["groups[:1]", "None", "[*groups, groups[0]]", "[g.group_id for g in groups]"])
def test_a_policy_that_returns_other_groups_is_named(tmp_path: Path, returned: str) -> None:
    (tmp_path / "mine.py").write_text(f"def order(groups):\n    return {returned}\n")
    with pytest.raises(BadPlugin, match=r"mine.py:order' must return the 2 groups"):
        get_policy(f"{tmp_path / 'mine.py'}:order")([group(0, 1, 2), group(1, 1, 2)])


def test_ages_are_counted_in_publications_through_a_fork_with_other_steps(tmp_path: Path) -> None:
    """Two optimizer steps an iteration, and from iteration 2 on one: versions 0, 2, 4, 5, 6, … are published."""
    parent = new_run(str(tmp_path), training={"num_steps_per_rollout": 2})
    config = {**parent.manifest.config, "training": {"num_steps_per_rollout": 1}}
    fork = Ledger.create(parent.store, "fork", config, parent=Parent(run=parent.run, iteration=1))
    published = [0, 2, 4, 5, 6]
    assert [weight_version_after(fork, index - 1) for index in range(5)] == published
    assert [sampled_from(fork, version) for version in published] == list(range(5))
    ages = token_ages(fork, 4, np.array([6, 6, 5, 4, 2, 0, 6]))
    assert (ages.tolist(), ages.dtype) == ([0, 0, 1, 2, 3, 4, 0], np.int32)
    assert token_ages(parent, 3, np.array([6, 4])).tolist() == [0, 1]
    with pytest.raises(ValueError, match="weight version 3 of run toy is inside an iteration"):
        sampled_from(fork, 3)
