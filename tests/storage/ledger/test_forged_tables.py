"""A table may name types of columns that some library reads by unpickling: they are not read."""

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cairn.storage.ledger.commits import OutputFile, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.logs.sample_log import SampleLog
from cairn.storage.opening import open_store
from cairn.storage.store.errors import Damaged
from tests.storage.builders import CONFIG


class Running(pa.ExtensionType):
    """A type of column such as libraries register, whose reader runs what the file says."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        super().__init__(pa.int64(), "tests.running")

    def __arrow_ext_serialize__(self) -> bytes:
        return self.mark.encode()

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> "Running":
        if serialized:
            Path(serialized.decode()).touch()
        return cls("")


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    pa.register_extension_type(Running(""))
    yield tmp_path / "mark"
    pa.unregister_extension_type("tests.running")


def table(mark: Path) -> pa.Table:
    running = pa.ExtensionArray.from_storage(Running(str(mark)), pa.array([1, 2]))
    return pa.table({"group_id": pa.array([0, 1]), "x": running})


def test_a_parquet_file_with_the_right_digest_runs_nothing(mark: Path, tmp_path: Path) -> None:
    sink = io.BytesIO()
    pq.write_table(table(mark), sink)
    mark.unlink(missing_ok=True)
    store = open_store(str(tmp_path / "store"))
    for data in (sink.getvalue(), b"PAR1 and nothing else PAR1"):
        store.write("runs/r/iterations/000000/reward/a/rewards.parquet", data)
        output = OutputFile(
            path="iterations/000000/reward/a/rewards.parquet",
            bytes=len(data),
            rows=2,
            sha256=hashlib.sha256(data).hexdigest(),
        )
        with pytest.raises(Damaged, match=r"rewards\.parquet is not in Cairn's format: it "):
            read_table(store, "r", output)
    assert not mark.exists()
    pq.read_table(pa.BufferReader(sink.getvalue()))
    assert mark.exists()


def test_a_part_of_the_write_ahead_log_with_the_right_digest_runs_nothing(mark: Path, tmp_path: Path) -> None:
    sink = pa.BufferOutputStream()
    forged = table(mark)
    with pa.ipc.new_file(sink, forged.schema) as writer:
        writer.write_table(forged)
    mark.unlink(missing_ok=True)
    ledger = Ledger.create(open_store(str(tmp_path / "store")), "r", CONFIG)
    ledger.acquire()
    dead, own = (ledger.attempt(0, Step.ROLLOUT, "00-000") for _ in range(2))
    for data in (sink.getvalue().to_pybytes(), b"ARROW1 and nothing else ARROW1"):
        part = dead.path(f"write_ahead/000000.{hashlib.sha256(data).hexdigest()}.arrow")
        ledger.store.write(part, data)
        with SampleLog(own, "inputs") as log, pytest.raises(Damaged, match=r"\.arrow is not in Cairn's format: it "):
            log.recover()
        ledger.store.delete(part)
    assert not mark.exists()
    pa.ipc.open_file(sink.getvalue()).read_all()
    assert mark.exists()
