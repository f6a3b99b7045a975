"""A run that removes its older files recovers as one that keeps them all."""

from pathlib import Path
from typing import Any

import pytest

from cairn.flows.iteration import collect, iteration, learn
from cairn.flows.train import remove_old_files
from cairn.storage.upkeep.retention import newest_checkpoint, retire
from cairn.storage.upkeep.verification import verify
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.selection import last_selection, trained_groups
from cairn.tasks.halves import publish_for_open_halves
from cairn.tasks.trainer.checkpoint import checkpoint_due
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

ITERATIONS = 7
BUFFERING = {"num_rollout": ITERATIONS, "rollout_batch_size": 3, "over_sampling_batch_size": 5}


def _go_on(run: RunContext, last: int) -> None:
    """From the newest iteration with commits through `last`, removing old files as the driver does."""
    for index in range(run.ledger.last_iteration() or 0, last + 1):
        iteration(run, DirectSteps(run), index)
        if checkpoint_due(run.config, index):
            remove_old_files(run)


@pytest.mark.parametrize(
    "save_interval", [pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.proof)]
)
def test_a_run_with_retention_ends_with_the_digest_of_one_without_though_killed_after_every_iteration(
    tiny_assets: Path, tmp_path: Path, save_interval: int
) -> None:
    options: dict[str, Any] = {"save_interval": save_interval}
    whole = tiny_config(tiny_assets, rollout=BUFFERING, checkpoint=options)
    with tiny_context(str(tmp_path / "whole"), whole) as (run, _):
        _go_on(run, ITERATIONS - 1)
        expected = train_digests(run, range(ITERATIONS))
    options |= {"save_retain_interval": 2 * save_interval, "retain_snapshots": 2}
    retaining = tiny_config(tiny_assets, rollout=BUFFERING, checkpoint=options)
    for last in range(ITERATIONS):  # every driver begins with fresh engines, which must be restored
        with tiny_context(str(tmp_path / "kept"), retaining) as (run, _):
            _go_on(run, last)
    assert train_digests(run, range(ITERATIONS)) == expected
    before_newest = newest_checkpoint(run.ledger, ITERATIONS - 2)
    assert before_newest is not None
    assert before_newest.iteration + 1 == (ITERATIONS - 1) // (2 * save_interval) * 2 * save_interval
    checks = list(verify(run.ledger))
    assert [finding for one in checks for finding in one.findings] == []
    assert sum(one.retired for one in checks) > 10, "the witness that files went"


def test_groups_of_batches_that_are_collected_and_yet_to_be_learned_from_stay(
    tiny_assets: Path, tmp_path: Path
) -> None:
    """With a lag there are several such batches; these are of groups that wait longest."""
    (tmp_path / "oldest.py").write_text("def order(groups):\n    return sorted(groups, key=lambda group: -group.age)\n")
    rollout = {
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "over_sampling_batch_size": 6,
        "max_age": 8,
        "pipeline": "lagged",
        "buffer_filter_path": f"{tmp_path / 'oldest.py'}:order",
        "num_rollout": 6,
    }
    config = tiny_config(tiny_assets, rollout=rollout, checkpoint={"save_interval": 1, "retain_snapshots": 2})
    with tiny_context(str(tmp_path), config) as (run, _):
        for index in range(3):
            iteration(run, DirectSteps(run), index)
        for index in (3, 4):
            collect(run, DirectSteps(run), index)
        assert {place[0] for place in trained_groups(run, last_selection(run, 3))} == {1}
        assert {place[0] for place in trained_groups(run, last_selection(run, 4))} == {2}
    with tiny_context(str(tmp_path), config) as (run, _):
        gone = retire(run.ledger, config.checkpoint, everything=True)
        assert [(one.iteration, one.kind) for one in gone] == [(0, "snapshots")]
        publish_for_open_halves(run)
        for index in (3, 4):
            learn(run, DirectSteps(run), index)
