"""Writing what comes in one by one in parts that many share, in a thread of its own.

Whatever was appended while the last part was written, and for `PACE` seconds after it, goes out as the next part: so a
log keeps up with any rate with one write at a time, and whoever appends never waits for it.
"""

import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from cairn.storage.ledger import layout
from cairn.storage.ledger import snapshots as tables
from cairn.storage.ledger.schemas import complete
from cairn.storage.store.canonical import from_json
from cairn.storage.store.errors import Damaged, StoreError
from cairn.storage.store.store import Store

# Parts of logs: Arrow IPC files that are written whole, whose names carry the SHA-256 of their bytes, and their
# schema's metadata the digest of the inputs that the rows were made from.


_INPUTS_KEY = b"inputs_digest"


def read_any_part(store: Store, path: str) -> pa.Table | None:
    """The rows of a part with its schema's metadata; None if it is torn, or has gone with its shard's commit."""
    try:
        data = store.read(path)
    except FileNotFoundError:
        return None
    if not path.endswith(f".{hashlib.sha256(data).hexdigest()}.arrow"):
        return None
    try:
        return tables.from_ipc(data)
    except ValueError as error:
        raise Damaged(f"{path} is not what Cairn writes: {error}") from error


def part_bytes(table: pa.Table, inputs_digest: str, metadata: Mapping[bytes, bytes] | None = None) -> tuple[str, bytes]:
    """A part of a log, with the digest of what its rows were made from, and more of its schema's metadata: its SHA-256
    and its bytes."""
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata({_INPUTS_KEY: inputs_digest, **(metadata or {})})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks())
    data = sink.getvalue().to_pybytes()
    return hashlib.sha256(data).hexdigest(), data


def accepted_rows(table: pa.Table, schema: pa.Schema, accepted: Collection[bytes]) -> pa.Table | None:
    """The rows of a part, with the columns that the schema has got since; None where it was made from other inputs than
    those of the digests that are accepted."""
    metadata = table.schema.metadata or {}
    table = complete(table.replace_schema_metadata(None), schema)
    return table if metadata.get(_INPUTS_KEY) in accepted and table.schema.equals(schema) else None


# What counts of logs that several attempts at the same have kept, where some of them still write.
#
# A driver that was suspended while another took its run over wakes and goes on writing. So who begins says what it has
# found: its first part names the other attempts, each with the number from which on its parts do not count.
#
# | a part | counts |
# |---|---|
# | of an attempt that every later one had found, below the numbers that they say | yes |
# | that was written since: from such a number on, or of an attempt of an earlier driver that was not found | never |
# | of attempts before any that say so (of earlier versions of the code) | yes |
#
# So all that a later attempt goes on from is of one history: it reads what ended before what was called for it, and of
# whoever writes meanwhile neither.


READERS = 8
"""Parts read at a time: an object store answers one after tens of milliseconds."""
FOUND = b"found"
"""In the metadata of a part's schema: JSON, numbers by the names of attempts."""


@dataclass(frozen=True)
class Part:
    """A file of a log."""

    attempt: str
    number: int
    path: str


@dataclass(frozen=True)
class Recovered:
    """The logs of other attempts."""

    tables: Sequence[tuple[Part, pa.Table | None]]
    """The rows of each part; None where nothing in it counts."""
    found: Mapping[str, int]
    """Which parts count, as the next part that is written says: below the number, of each attempt."""


def recover(store: Store, parts: Sequence[Part], schema: pa.Schema, accepted: Collection[bytes]) -> Recovered:
    """Read the parts of a log of other attempts. `accepted`: digests of the inputs whose rows count."""
    with ThreadPoolExecutor(READERS) as readers:
        tables = list(readers.map(lambda part: read_any_part(store, part.path), parts))
    said = {
        part.attempt: _found(part.path, table)
        for part, table in zip(parts, tables, strict=True)
        if table is not None and FOUND in (table.schema.metadata or {})
    }
    limits = {name: min(_limits(name, said), default=inf) for name in {part.attempt for part in parts}}
    counted = [
        (part, None if table is None or part.number >= limits[part.attempt] else accepted_rows(table, schema, accepted))
        for part, table in zip(parts, tables, strict=True)
    ]
    ends = {name: 1 + max(part.number for part in parts if part.attempt == name) for name in limits}
    return Recovered(counted, {name: int(min(limit, ends[name])) for name, limit in limits.items()})


def says(recovered: Recovered, attempt: str) -> dict[bytes, bytes] | None:
    """What an attempt says at its beginning, as metadata of a part; None where no other can be writing."""
    if not recovered.found and layout.attempt_epoch(attempt) <= 1:
        return None
    return {FOUND: json.dumps(dict(recovered.found), sort_keys=True).encode()}


def _limits(name: str, said: Mapping[str, Mapping[str, int]]) -> list[float]:
    """The numbers from which on parts of an attempt do not count, by the others of its driver or later ones."""
    epoch = layout.attempt_epoch(name)
    others = {other: found for other, found in said.items() if other != name}
    return [
        found.get(name, 0)
        for other, found in others.items()
        if layout.attempt_epoch(other) > epoch or (layout.attempt_epoch(other) == epoch and name in found)
    ]


def _found(path: str, table: pa.Table) -> dict[str, int]:
    try:
        said: Any = from_json(table.schema.metadata[FOUND])
    except ValueError:
        said = None
    if not isinstance(said, dict) or not all(isinstance(number, int) for number in said.values()):
        raise Damaged(f"{path} is not what Cairn writes: it does not say which parts it found")
    return said


PACE = 0.08
"""Seconds between two parts, so that what finishes one by one shares them."""


class PacedWriter:
    """`append` and `close` raise the error that stopped the background writer, if any. As a context manager it closes
    itself."""

    def __init__(self, write: Callable[[int, list[Any]], None], what: str, deadline: float = 120.0) -> None:
        """`write(number, items)` makes a part durable. `what` it writes, for messages. `deadline`: seconds that `close`
        may take."""
        self._write = write
        self._what = what
        self._deadline = deadline
        self._changed = threading.Condition()
        self._waiting: list[Any] = []
        self._then: list[Callable[[], None]] = []
        self._urgent = False
        self._closed = False
        self._error: Exception | None = None
        # A daemon: a process that ends must not wait for a store that does not answer.
        self._writer = threading.Thread(target=self._write_parts, name="paced-writer", daemon=True)
        self._writer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as second:  # what broke the work off is what its caller must hear of
            error.add_note(f"{type(second).__name__} meanwhile: {second}")

    def append(self, *finished: Any, then: Callable[[], None] | None = None, urgent: bool = False) -> None:
        """Hand over what has finished. Returns at once. `then` is called, by the writer's thread, when it is durable
        with all before it; `urgent`: somebody waits for that, so that no others are waited for."""
        with self._changed:
            self._raise_error()
            if self._closed:
                raise ValueError("the log is closed")
            self._waiting += finished
            if then is not None:
                self._then.append(then)
            self._urgent |= urgent
            self._changed.notify()

    @property
    def broken(self) -> bool:
        """Whether an error has stopped the writer: nothing more becomes durable."""
        return self._error is not None

    def close(self) -> None:
        """Return when everything appended is durable. Raises StoreError if that takes longer than the deadline."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._writer.join(self._deadline)
        with self._changed:
            self._raise_error()
        if self._writer.is_alive():
            raise StoreError(f"writing {self._what} did not end in {self._deadline:.0f} s")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_parts(self) -> None:
        try:
            for number in itertools.count():
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._urgent, PACE if number else 0)
                    self._changed.wait_for(lambda: self._waiting or self._then or self._closed)
                    waiting, self._waiting = self._waiting, []
                    then, self._then = self._then, []
                    self._urgent = False
                if not waiting and not then:
                    return
                if waiting:
                    self._write(number, waiting)
                for told in then:
                    told()
        except Exception as error:
            with self._changed:
                self._error = error


# The parts of a stream's logs, which are of use as long as one of their groups is open.


class GroupParts:
    """Those of one log. For one thread at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._groups: dict[str, set[int]] = {}

    def add(self, path: str, groups: Iterable[int]) -> None:
        """There is a part with rows of these open groups."""
        self._groups[path] = set(groups)

    def forget(self, groups: Collection[int]) -> None:
        """A commit has these groups: nobody needs their rows any more."""
        for ids in self._groups.values():
            ids.difference_update(groups)
        self.remove_used_up()

    def remove_used_up(self) -> None:
        """In vain where the store does not answer: a later driver removes what is left."""
        paths = [path for path, ids in self._groups.items() if not ids]
        with suppress(StoreError):
            for path in paths:
                self._store.delete(path)
                del self._groups[path]
