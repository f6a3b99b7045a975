"""A run as its ledger records it: the results of its steps, without its engines."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import pyarrow as pa
from cachetools import LRUCache

from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger.commits import Commit, OutputFile, Step
from cairn.storage.ledger.layout import CALLS_FILE, RESULTS_FILE
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import CALLS, IMAGE_BYTES, complete
from cairn.storage.ledger.snapshots import CheckedTable, read_recorded_table
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store

TABLE_CACHE_BYTES = 1 << 28
"""Maximum size, in bytes, of the snapshots that stay in memory after a write or read, since later steps of the
iteration read them again. A snapshot of which only some columns were read stays as its file."""
COMMIT_CACHE = 1 << 13
"""Maximum number of commits that stay in memory. An iteration with 256 shards has about 520, of some 8 KB each."""

K = TypeVar("K")
V = TypeVar("V")


class _Recent(Generic[K, V]):
    """The values that were used last, up to a total size. Thread-safe."""

    def __init__(self, limit: int, size: Callable[[V], int]) -> None:
        self._lock = threading.Lock()
        self._values: LRUCache[K, V] = LRUCache(limit, size)

    def get(self, key: K) -> V | None:
        with self._lock:
            return self._values.get(key)

    def add(self, key: K, value: V) -> None:
        with self._lock, suppress(ValueError):  # larger than the limit
            self._values[key] = value


class Snapshots:
    """Tables of commits, which are not read again while they are in use. Thread-safe."""

    def __init__(self, store: Store, cache_bytes: int = TABLE_CACHE_BYTES) -> None:
        self._store = store
        self._tables: _Recent[str, pa.Table | CheckedTable] = _Recent(cache_bytes, lambda table: table.nbytes)
        """Snapshots by their digests."""

    def read(self, commit: Commit, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the Parquet snapshot of a commit that has exactly one, checked against its digest, or those of some
        columns that it has."""
        kept = self._tables.get(commit.table.sha256)
        if kept is None:
            kept = CheckedTable(self._store, commit.run, commit.table)
            self._tables.add(commit.table.sha256, kept)
        if columns is None:
            if isinstance(kept, CheckedTable):
                kept = kept.read()
                self.remember(commit.table, kept)
            return kept
        if isinstance(kept, CheckedTable):
            return kept.read(columns)
        return kept.select([name for name in kept.column_names if name in columns])

    def images(self, commit: Commit) -> dict[str, bytes]:
        """Return the images of a rollout's prompts by their SHA-256, checked as in `read`."""
        if commit.images is None:
            return {}
        table = self._read(commit.run, commit.images)
        return dict(zip(*(table.column(name).to_pylist() for name in IMAGE_BYTES.names), strict=True))

    def calls(self, commit: Commit) -> tuple[pa.Table, pa.Table | None] | None:
        """Return the recorded calls of the code behind a step's samples, and its long results, checked as in `read`:
        rows of CALLS and of LONG_RESULTS. None where nothing was recorded."""
        calls, results = (commit.side_file(name) for name in (CALLS_FILE, RESULTS_FILE))
        if calls is None:
            return None
        long = None if results is None else self._read(commit.run, results)
        return complete(self._read(commit.run, calls), CALLS), long

    def _read(self, run: str, output: OutputFile) -> pa.Table:
        kept = self._tables.get(output.sha256)
        if kept is None or isinstance(kept, CheckedTable):
            kept = read_recorded_table(self._store, run, output)
            self.remember(output, kept)
        return kept

    def holds(self, output: OutputFile) -> bool:
        """Return whether a snapshot was read or written lately, so that it need not be read from the store."""
        return self._tables.get(output.sha256) is not None

    def remember(self, output: OutputFile, table: pa.Table) -> None:
        """Cache a snapshot that was just written: the next steps read it."""
        self._tables.add(output.sha256, table)


class RecordedRun(Snapshots):
    """Commits and tables of a run, which are not read again while they are in use. Thread-safe."""

    def __init__(self, config: RunConfig, ledger: Ledger, cache_bytes: int = TABLE_CACHE_BYTES) -> None:
        super().__init__(ledger.store, cache_bytes)
        self.config = config
        self.ledger = ledger
        self._commits: _Recent[tuple[int, Step, str | None], Commit] = _Recent(COMMIT_CACHE, lambda commit: 1)

    def find(self, iteration: int, step: Step, shard: str | None = None) -> Commit | None:
        """Return the step's commit, or None. Commits never change, so one that was seen lately is not read again."""
        key = (iteration, step, shard)
        commit = self._commits.get(key)
        if commit is None:
            commit = self.ledger.find(iteration, step, shard)
            if commit is not None:
                self._commits.add(key, commit)
        return commit

    def committed(self, iteration: int, step: Step, shard: str | None = None) -> Commit:
        """Return the step's commit. Raises Damaged if it is missing although it must exist."""
        commit = self.find(iteration, step, shard)
        if commit is None:
            name = f"{iteration:06d}/{step}" + (f".{shard}" if shard else "")
            raise Damaged(f"the commit {name} of run {self.ledger.run} is missing, but later steps were made from it")
        return commit
