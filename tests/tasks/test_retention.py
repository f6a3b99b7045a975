"""A run that removes its older files recovers as one that keeps them all."""

from pathlib import Path
from typing import Any

import pytest

from cairn.flows.iteration import iteration
from cairn.flows.train import remove_old_files
from cairn.storage.retention import newest_checkpoint
from cairn.storage.verification import verify
from cairn.tasks.context import RunContext
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

ITERATIONS = 7
BUFFERING = {"num_rollout": ITERATIONS, "rollout_batch_size": 3, "over_sampling_batch_size": 5}


def _go_on(run: RunContext, last: int) -> None:
    """From the newest iteration with commits through `last`, removing old files as the driver does."""
    for index in range(run.ledger.last_iteration() or 0, last + 1):
        iteration(run, DirectSteps(run), index)
        remove_old_files(run, index)


@pytest.mark.parametrize("save_interval", [1, 3])
def test_a_run_with_retention_ends_with_the_digest_of_one_without_though_killed_after_every_iteration(
    tiny_assets: Path, tmp_path: Path, save_interval: int
) -> None:
    options: dict[str, Any] = {"save_interval": save_interval}
    whole = tiny_config(tiny_assets, rollout=BUFFERING, checkpoint=options)
    with tiny_context(str(tmp_path / "whole"), whole) as (run, _):
        _go_on(run, ITERATIONS - 1)
        expected = train_digests(run, range(ITERATIONS))
    options |= {"save_retain_interval": 2 * save_interval, "retain_snapshots": 2}
    kept = tiny_config(tiny_assets, rollout=BUFFERING, checkpoint=options)
    for last in range(ITERATIONS):  # every driver begins with fresh engines, which must be restored
        with tiny_context(str(tmp_path / "kept"), kept) as (run, _):
            _go_on(run, last)
    assert train_digests(run, range(ITERATIONS)) == expected
    before_newest = newest_checkpoint(run.ledger, ITERATIONS - 2)
    assert before_newest is not None
    assert before_newest.iteration + 1 == (ITERATIONS - 1) // (2 * save_interval) * 2 * save_interval
    checks = list(verify(run.ledger))
    assert [finding for one in checks for finding in one.findings] == []
    assert sum(one.retired for one in checks) > 10, "the witness that files went"
