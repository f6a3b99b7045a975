"""What a driver keeps in memory is bounded by bytes."""

from pathlib import Path

import pyarrow as pa
import pytest

from cairn.storage.ledger.commits import OutputFile
from tests.tiny_run import tiny_config, tiny_context


def output(number: int) -> OutputFile:
    return OutputFile(path="a", bytes=1, sha256=f"{number:064x}")


def test_the_snapshot_asked_for_longest_ago_goes_when_there_are_too_many_bytes(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"tokens": list(range(1000))})
    monkeypatch.setattr("cairn.tasks.durable.recorded_run.TABLE_CACHE_BYTES", 3 * table.nbytes)
    with tiny_context(str(tmp_path), tiny_config(tiny_assets)) as (run, _):
        for number in (0, 1, 2, 0, 3):  # 0 is asked for again before there is one too many
            run.remember(output(number), table)
        assert list(run._tables._tables) == [f"{number:064x}" for number in (2, 0, 3)]
        run.remember(output(4), pa.table({"tokens": list(range(4000))}))
        assert not run._tables._tables  # larger than all that may be kept
