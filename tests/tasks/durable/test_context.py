"""What a driver keeps in memory is bounded."""

from pathlib import Path

import pyarrow as pa
import pytest

from cairn.storage.ledger.commits import OutputFile, Step
from cairn.storage.opening import open_store
from cairn.tasks.durable.recorded_run import Snapshots
from tests.flows.written_runs import recorded_reads
from tests.storage.builders import ENVIRONMENT, commit_step, rollout_table
from tests.tiny_run import tiny_config, tiny_context


def output(number: int) -> OutputFile:
    return OutputFile(path="a", bytes=1, sha256=f"{number:064x}")


def test_the_snapshot_asked_for_longest_ago_goes_when_there_are_too_many_bytes(tmp_path: Path) -> None:
    table = pa.table({"tokens": list(range(1000))})
    snapshots = Snapshots(open_store(str(tmp_path)), 3 * table.nbytes)
    for number in (0, 1, 2, 0, 3):  # 0 is asked for again before there is one too many
        snapshots.remember(output(number), table)
    kept = {f"{number:064x}" for number in (2, 0, 3)}
    assert set(snapshots._tables._values) == kept
    snapshots.remember(output(4), pa.table({"tokens": list(range(4000))}))
    assert set(snapshots._tables._values) == kept  # a table larger than all that may be kept is not, and drops none


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


def test_a_file_of_which_columns_were_read_is_not_read_again_for_others(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = rollout_table([0, 1])
    with tiny_context(str(tmp_path), tiny_config(tiny_assets)) as (run, _):
        commit = commit_step(run.ledger, 0, Step.ROLLOUT, "00-000", table=table)
        reads = recorded_reads(monkeypatch)
        assert run.read(commit, ["group_id"]).column_names == ["group_id"]
        assert run.read(commit, ["status", "trajectories"]).column_names == ["status"]
        assert run.read(commit).equals(table)
        assert run.read(commit, ["status"]).equals(table.select(["status"]))
        assert len(reads) == 1
