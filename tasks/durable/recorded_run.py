"""A run as its ledger records it: the results of its steps, without its engines."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pyarrow as pa

from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger.commits import Commit, OutputFile, Step
from cairn.storage.ledger.layout import CALLS_FILE, RESULTS_FILE
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import CALLS, IMAGE_BYTES, complete
from cairn.storage.ledger.snapshots import read_recorded_table, read_table
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store

TABLE_CACHE_BYTES = 2 << 30
"""Maximum size, in bytes, of the snapshots that stay in memory after a write or read, since later steps of the
iteration read them again. Beyond it, the least recently used one is dropped."""


class _Tables:
    """LRU cache of snapshots by their digests, at most `TABLE_CACHE_BYTES`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[str, tuple[pa.Table, int]] = OrderedDict()
        """Tables and their sizes in bytes, the least recently used first."""
        self._bytes = 0

    def get(self, digest: str) -> pa.Table | None:
        with self._lock:
            if digest not in self._tables:
                return None
            self._tables.move_to_end(digest)
            return self._tables[digest][0]

    def add(self, digest: str, table: pa.Table) -> None:
        with self._lock:
            self._bytes -= self._tables.pop(digest, (table, 0))[1]
            self._tables[digest] = table, table.nbytes
            self._bytes += table.nbytes
            while self._bytes > TABLE_CACHE_BYTES:
                _, (_, dropped_bytes) = self._tables.popitem(last=False)
                self._bytes -= dropped_bytes


class RecordedRun:
    """Commits and tables of a run, each read once. Thread-safe."""

    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self.config = config
        self.ledger = ledger
        self._lock = threading.Lock()
        self._commits: dict[tuple[int, Step, str | None], Commit] = {}
        self._tables = _Tables()

    def find(self, iteration: int, step: Step, shard: str | None = None) -> Commit | None:
        """Return the step's commit, or None. Commits never change, so one that was seen is not read again."""
        key = (iteration, step, shard)
        if key not in self._commits:
            commit = self.ledger.find(iteration, step, shard)
            if commit is None:
                return None
            self._commits[key] = commit
        return self._commits[key]

    def committed(self, iteration: int, step: Step, shard: str | None = None) -> Commit:
        """Return the step's commit. Raises Damaged if it is missing although it must exist."""
        commit = self.find(iteration, step, shard)
        if commit is None:
            name = f"{iteration:06d}/{step}" + (f".{shard}" if shard else "")
            raise Damaged(f"the commit {name} of run {self.ledger.run} is missing, but later steps were made from it")
        return commit

    def read(self, commit: Commit, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the Parquet snapshot of a commit that has exactly one, checked against its digest."""
        table = self._read(commit.run, commit.table, read_table)
        return table if columns is None else table.select(list(columns))

    def images(self, commit: Commit) -> dict[str, bytes]:
        """Return the images of a rollout's prompts by their SHA-256, checked as in `read`."""
        if commit.images is None:
            return {}
        table = self._read(commit.run, commit.images, read_recorded_table)
        return dict(zip(*(table.column(name).to_pylist() for name in IMAGE_BYTES.names), strict=True))

    def calls(self, commit: Commit) -> tuple[pa.Table, pa.Table | None] | None:
        """Return the recorded calls of the code behind a step's samples, and its long results, checked as in `read`:
        rows of CALLS and of LONG_RESULTS. None where nothing was recorded."""
        calls, results = (commit.side_file(name) for name in (CALLS_FILE, RESULTS_FILE))
        if calls is None:
            return None
        long = None if results is None else self._read(commit.run, results, read_recorded_table)
        return complete(self._read(commit.run, calls, read_recorded_table), CALLS), long

    def _read(self, run: str, output: OutputFile, read: Callable[[Store, str, OutputFile], pa.Table]) -> pa.Table:
        table = self._tables.get(output.sha256)
        if table is None:
            table = read(self.ledger.store, run, output)
            self.remember(output, table)
        return table

    def remember(self, output: OutputFile, table: pa.Table) -> None:
        """Cache a snapshot that was just written: the next steps read it."""
        self._tables.add(output.sha256, table)
