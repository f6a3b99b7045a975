"""The log of a stream: samples as far as they came, durable though no step has taken them yet.

A driver of a run that streams keps one from its start to its end:
```
runs/<run>/stream/000003-5f0c…/write_ahead/000000.<sha256>.arrow
```
A part is as `cairn.storage.logs.write_ahead` has it, but for this: a sample may have several rows, one for each time
that it was interrupted and one where it ended.

| a later driver finds | meaning |
|---|---|
| a row with which a sample ended | that is how it ended; of several the first counts |
| what an earlier driver wrote after a later one began | it never counts: `cairn.storage.logs.parts` |
| rows of a sample that did not end | it goes on from the newest |
| a part that is torn, or made from other inputs | nobody's: it is removed |

The rows of a group are of no use once the commit of a rollout step has them; a part goes when all of its groups have.
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
    """The prompts, as rows of the data set, of which samples lie in logs of a run's drivers."""
    tables = (read_any_part(store, path) for path in chain.from_iterable(_parts(store, run).values()))
    return {row for table in tables if table is not None for row in table["prompt_index"].to_pylist()}


def stream_parts(store: Store, run: str) -> dict[str, int]:
    """Store paths and sizes of the parts of all logs of a run's drivers, those of calls included."""
    found = store.find(layout.stream(run))
    return {path: size for path, size in found.items() if path.endswith(".arrow")}


def groups_of_part(store: Store, path: str) -> set[int]:
    """The groups that a part has rows of; empty if it is torn, or has gone meanwhile."""
    table = read_any_part(store, path)
    return set() if table is None else set(table["group_id"].to_pylist())


def _parts(store: Store, run: str, besides: str = "") -> dict[str, list[str]]:
    """Store paths of the parts of all drivers but one, by their names."""
    found: dict[str, list[str]] = {}
    for name in map(layout.parse_attempt, store.list(layout.stream(run))):
        if name is not None and name != besides:
            folder = f"{layout.stream(run)}/{name}/{PARTS}"
            found[name] = [f"{folder}/{part}" for part in store.list(folder) if part.endswith(".arrow")]
    return found


class StreamLog(PacedWriter):
    """That of one driver. A context manager, as the write-ahead log of a step's samples is."""

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
        """
        Args:
            folder: of the driver.
            inputs_digest: of everything the rows depend on; only parts made from the same are taken over.
            schema: of the rows.
            encode: makes rows of what was appended, in the log's own thread.
            earlier_digests: of the same inputs by the rules of earlier versions of the code.
            deadline: seconds that `close` may take.
        """
        self._run = run
        self._folder = folder
        self._inputs_digest = inputs_digest
        self._accepted = {digest.encode() for digest in (inputs_digest, *earlier_digests)}
        self._schema = schema
        self._encode = encode
        self._parts = GroupParts(folder.store)
        """Of the writer's thread, once it has begun."""
        self._numbers = count()
        super().__init__(self._write_samples, f"samples to {self._folder.folder}", deadline)

    def recover(self, groups: Collection[int]) -> pa.Table:
        """The rows of earlier drivers that samples of these groups go on from, or ended with: one a sample, in the
        order in which they were written. Parts of no other groups are removed. To be called before anything is
        appended, and before the calls of the samples are read: what ended was called for before."""
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
        """A commit has these groups: their rows are of no use any more, nor those that are on their way."""
        self.append(then=partial(self._parts.forget, set(groups)))

    def close(self) -> None:
        """See `PacedWriter.close`."""
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
    """Of each sample the row that counts, in order."""
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


# The log of calls of a run that streams: what the code of samples that no step has taken was given.
#
# A driver keeps one beside its log of those samples (`cairn.storage.logs.stream_log`), from its start to its end:
# ```
# runs/<run>/stream/000003-5f0c…/write_ahead/calls/0002-000000.<sha256>.arrow
# ```
# It is as the one of a step (`cairn.storage.logs.call_log`), drivers in place of the step's attempts, but for this: a
# part goes when commits have all of its groups.


class StreamCallLog(CallLog):
    """That of one driver."""

    def __init__(
        self,
        folder: AttemptFolder,
        inputs_digest: str,
        groups: Collection[int],
        *,
        encode: Callable[[list[Any]], pa.Table],
        earlier_digests: Collection[str] = (),
    ) -> None:
        """See `CallLog`. `groups`: those that no step has taken; rows and parts of others are of no use."""
        self._parts = GroupParts(folder.store)
        """Of the writer's thread, once it has begun."""
        self._open = frozenset(groups)
        self._first: str | None = None
        """The part that says that there is this log: it stays as long as its driver."""
        super().__init__(folder, inputs_digest, encode=encode, earlier_digests=earlier_digests)
        self._parts.remove_used_up()
        self.recovered = self.recovered.filter(pc.is_in(self.recovered["group_id"], pa.array(groups, pa.int64())))

    def forget(self, groups: Iterable[int]) -> None:
        """See `StreamLog.forget`."""
        self.append(then=partial(self._parts.forget, set(groups)))

    def close(self) -> None:
        """See `PacedWriter.close`."""
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
