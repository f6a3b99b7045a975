"""The log of a stream: samples, finished or partial, that are durable although no step has taken them yet.

A driver of a streaming run writes one from its start to its end:
```
runs/<run>/stream/000003-5f0c…/write_ahead/000000.<sha256>.arrow
```
The format of a part is that of `cairn.storage.logs.write_ahead`, with one difference: a sample may have several rows,
one for each interruption and one for its end.

| a later driver finds | meaning |
|---|---|
| a row with which a sample ended | that is its end; the first of several counts |
| rows that an earlier driver wrote after a later one began | they never count: `cairn.storage.logs.parts` |
| rows of a sample that did not end | generation resumes from the newest |
| a torn part, or a part of other inputs | useless: it is deleted |

The rows of a group are useless once the commit of a rollout step contains them. A part is deleted when commits contain
all of its groups.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, count
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cairn.storage.ledger import layout
from cairn.storage.ledger.schemas import Status
from cairn.storage.ledger.snapshots import PARTS, AttemptFolder
from cairn.storage.logs.call_log import CallLog
from cairn.storage.logs.parts import GroupParts, PacedWriter, part_bytes, read_any_part, recover, says
from cairn.storage.logs.write_ahead import parts_of
from cairn.storage.store.errors import StoreError
from cairn.storage.store.store import Store


def prompts_in_stream(store: Store, run: str) -> set[int]:
    """Return the prompts, as rows of the data set, of which samples are in the logs of a run's drivers."""
    tables = (read_any_part(store, path) for path in chain.from_iterable(_parts(store, run).values()))
    return {row for table in tables if table is not None for row in table["prompt_index"].to_pylist()}


def stream_parts(store: Store, run: str) -> dict[str, int]:
    """Return store paths and sizes in bytes of the parts of all logs of a run's drivers, including those of calls."""
    found = store.find(layout.stream(run))
    return {path: size for path, size in found.items() if path.endswith(".arrow")}


def groups_of_part(store: Store, path: str) -> set[int]:
    """Return the groups with rows in a part; empty if the part is torn or was deleted meanwhile."""
    table = read_any_part(store, path)
    return set() if table is None else set(table["group_id"].to_pylist())


def _parts(store: Store, run: str, besides: str = "") -> dict[str, list[str]]:
    """Return the store paths of the parts of all drivers except `besides`, by the drivers' attempts."""
    found: dict[str, list[str]] = {}
    for name in map(layout.parse_attempt, store.list(layout.stream(run))):
        if name is not None and name != besides:
            folder = f"{layout.stream(run)}/{name}/{PARTS}"
            found[name] = [f"{folder}/{part}" for part in store.list(folder) if part.endswith(".arrow")]
    return found


class StreamLog(PacedWriter):
    """Log of the samples of one driver. Use it as a context manager."""

    def __init__(
        self,
        folder: AttemptFolder,
        run: str,
        inputs_digest: str,
        *,
        schema: pa.Schema,
        encode: Callable[[list[Any]], pa.Table],
        earlier_digests: Collection[str] = (),
        deadline: float = 120.0,
    ) -> None:
        """Begin the log.

        Args:
            folder: folder of the driver.
            run: name of the run.
            inputs_digest: digest of everything that the rows depend on; only parts made from the same inputs are
                recovered.
            schema: schema of the rows.
            encode: converts appended items to rows, in the log's own thread.
            earlier_digests: digests of the same inputs by the rules of earlier versions of the code.
            deadline: greatest number of seconds for `close`.
        """
        self._run = run
        self._folder = folder
        self._inputs_digest = inputs_digest
        self._accepted = {digest.encode() for digest in (inputs_digest, *earlier_digests)}
        self._schema = schema
        self._encode = encode
        self._parts = GroupParts(folder.store)
        """Parts of this log. After the start only the writer's thread uses it."""
        self._numbers = count()
        super().__init__(self._write_samples, f"samples to {self._folder.folder}", deadline)

    def recover(self, groups: Collection[int]) -> pa.Table:
        """Return the rows of earlier drivers with which samples of these groups ended or from which they resume.

        Returns one row for each sample, in the order of writing. Deletes the parts without such groups. Call it before
        anything is appended, and before the calls of the samples are read: the calls of a finished sample were made
        before it ended.
        """
        store = self._folder.store
        others = _parts(store, self._run, besides=self._folder.name)
        parts = [*chain.from_iterable(parts_of(name, paths) for name, paths in others.items())]
        recovered = recover(store, parts, self._schema, self._accepted)
        if groups and (found := says(recovered, self._folder.name)) is not None:
            self._parts.add(self._write_part(self._schema.empty_table(), found), groups)
        tables = [self._schema.empty_table()]
        for part, table in recovered.tables:
            ids = [] if table is None else table["group_id"].to_pylist()
            self._parts.add(part.path, {id for id in ids if id in groups})
            if table is not None:
                tables.append(table.filter(pa.array([id in groups for id in ids], pa.bool_())))
        self._parts.remove_used_up()
        rows = pa.concat_tables(tables)
        return rows.take(pa.array(_newest(rows), pa.int64())).combine_chunks()

    def forget(self, groups: Iterable[int]) -> None:
        """Drop the rows of groups that a commit contains, including rows that are still queued."""
        self.append(then=partial(self._parts.forget, set(groups)))

    def close(self) -> None:
        """Wait until everything appended is durable, and remove empty folders. Raises StoreError."""
        super().close()
        with suppress(StoreError):
            self._folder.store.remove_empty_folders(self._folder.beside)

    def _write_samples(self, number: int, samples: list[Any]) -> None:
        table = self._encode(samples)
        self._write_part(table)

    def _write_part(self, table: pa.Table, metadata: Mapping[bytes, bytes] | None = None) -> str:
        sha256, data = part_bytes(table, self._inputs_digest, metadata)
        path = self._folder.path(f"{PARTS}/{next(self._numbers):06d}.{sha256}.arrow")
        self._parts.add(path, table["group_id"].to_pylist())
        self._folder.store.write(path, data)
        return path


def _newest(rows: pa.Table) -> list[int]:
    """Return the index of the row that counts for each sample, in order."""
    columns = zip(*(rows[name].to_pylist() for name in ("group_id", "sample_index", "status")), strict=True)
    counts: dict[tuple[int, int], int] = {}
    ended = set[tuple[int, int]]()
    for row, (group, sample, status) in enumerate(columns):
        if (group, sample) in ended:
            continue
        counts[group, sample] = row
        if status != Status.ABORTED:
            ended.add((group, sample))
    return sorted(counts.values())


# The log of calls of a streaming run: calls of samples that no step has taken.
#
# A driver writes it from its start to its end, next to its log of these samples:
# ```
# runs/<run>/stream/000003-5f0c…/write_ahead/calls/0002-000000.<sha256>.arrow
# ```
# The format is that of a step's log (`cairn.storage.logs.call_log`), with drivers in place of attempts. In contrast, a
# part is deleted when commits contain all of its groups.


class StreamCallLog(CallLog):
    """Log of the calls of one driver."""

    def __init__(
        self,
        folder: AttemptFolder,
        inputs_digest: str,
        groups: Collection[int],
        *,
        encode: Callable[[list[Any]], pa.Table],
        earlier_digests: Collection[str] = (),
    ) -> None:
        """Begin the log.

        Args:
            folder: folder of the driver.
            inputs_digest: digest of everything that the rows depend on.
            groups: groups that no step has taken; rows and parts of other groups are useless.
            encode: converts appended items to rows of CALLS, in the log's own thread.
            earlier_digests: digests of the same inputs by the rules of earlier versions of the code.
        """
        self._parts = GroupParts(folder.store)
        """Parts of this log. After the start only the writer's thread uses it."""
        self._open = frozenset(groups)
        self._first: str | None = None
        """Part that marks the existence of this log. It stays as long as its driver runs."""
        super().__init__(folder, inputs_digest, encode=encode, earlier_digests=earlier_digests)
        self._parts.remove_used_up()
        self.recovered = self.recovered.filter(pc.is_in(self.recovered["group_id"], pa.array(groups, pa.int64())))

    def forget(self, groups: Iterable[int]) -> None:
        """Drop the rows of groups that a commit contains, including rows that are still queued."""
        self.append(then=partial(self._parts.forget, set(groups)))

    def close(self) -> None:
        """Wait until everything appended is durable, and delete the first part. Raises StoreError."""
        super().close()
        if self._first is not None:
            self._parts.add(self._first, ())
            self._parts.remove_used_up()

    def _write_calls(self, number: int, calls: list[Any]) -> None:
        super()._write_calls(number, calls)
        self._written.clear()  # whoever appended them has them

    def _recovered_part(self, path: str, table: pa.Table | None) -> None:
        ids = set() if table is None else set(table["group_id"].to_pylist())
        self._parts.add(path, ids & self._open)

    def _wrote_part(self, path: str, table: pa.Table) -> None:
        if self._first is None:
            self._first = path
        else:  # one without rows says what of others does not count, as long as that may be needed
            self._parts.add(path, table["group_id"].to_pylist() if table.num_rows else self._open)
