"""What a driver keeps in memory is bounded."""

from pathlib import Path

import pyarrow as pa
import pytest

from cairn.storage.ledger.commits import OutputFile, Step
from cairn.storage.opening import open_store
from cairn.tasks.durable.recorded_run import Snapshots
from tests.storage.builders import ENVIRONMENT
from tests.tiny_run import tiny_config, tiny_context


def output(number: int) -> OutputFile:
    return OutputFile(path="a", bytes=1, sha256=f"{number:064x}")


def test_the_snapshot_asked_for_longest_ago_goes_when_there_are_too_many_bytes(tmp_path: Path) -> None:
    table = pa.table({"tokens": list(range(1000))})
    snapshots = Snapshots(open_store(str(tmp_path)), 3 * table.nbytes)
    for number in (0, 1, 2, 0, 3):  # 0 is asked for again before there is one too many
        snapshots.remember(output(number), table)
    assert list(snapshots._tables._values) == [f"{number:064x}" for number in (2, 0, 3)]
    snapshots.remember(output(4), pa.table({"tokens": list(range(4000))}))
    assert not snapshots._tables._values  # larger than all that may be kept


def test_a_commit_is_read_again_after_many_others_and_not_before(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.tasks.durable.recorded_run.COMMIT_CACHE", 2)
    with tiny_context(str(tmp_path), tiny_config(tiny_assets)) as (run, _):
        attempts = [run.ledger.attempt(iteration, Step.SYNC) for iteration in range(3)]
        commits = [
            run.commit(
                iteration=iteration,
                step=Step.SYNC,
                shard=None,
                attempt=attempt,
                inputs={},
                config_digest="0" * 64,
                environment=ENVIRONMENT,
                started_at=0.0,
            )
            for iteration, attempt in enumerate(attempts)
        ]
        found = [run.find(iteration, Step.SYNC) for iteration in range(3)]
        assert found == commits
        assert found[0] is not commits[0]
        assert run.find(2, Step.SYNC) is found[2]
