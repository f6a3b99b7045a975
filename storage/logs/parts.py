"""A background writer for logs: items that arrive one by one are written in shared parts.

The items appended during the last write and the following `PACE` seconds form the next part. So a log keeps up with any
rate with one write at a time, and `append` never waits for a write.
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

# Parts of logs: Arrow IPC files, written whole. The name of a part carries the SHA-256 of its bytes, the metadata of
# its schema the digest of the inputs from which the rows were made.


_INPUTS_KEY = b"inputs_digest"


def read_any_part(store: Store, path: str) -> pa.Table | None:
    """Return the rows of a part with its schema's metadata; None if it is torn, or was deleted after its shard's
    commit."""
    try:
        data = store.read(path)
    except FileNotFoundError:
        return None
    if not path.endswith(f".{hashlib.sha256(data).hexdigest()}.arrow"):
        return None
    try:
        return tables.from_ipc(data)
    except ValueError as error:
        raise Damaged(f"{path} is not in Cairn's format: {error}") from error


def part_bytes(table: pa.Table, inputs_digest: str, metadata: Mapping[bytes, bytes] | None = None) -> tuple[str, bytes]:
    """Encode a part of a log. Return its SHA-256 and its bytes.

    Args:
        table: rows of the part.
        inputs_digest: digest of the inputs from which the rows were made.
        metadata: further metadata of the schema.
    """
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata({_INPUTS_KEY: inputs_digest, **(metadata or {})})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks())
    data = sink.getvalue().to_pybytes()
    return hashlib.sha256(data).hexdigest(), data


def accepted_rows(table: pa.Table, schema: pa.Schema, accepted: Collection[bytes]) -> pa.Table | None:
    """Return the rows of a part, with the columns that the schema got later.

    Returns None if the part was made from inputs whose digest is not in `accepted`, or has another schema.
    """
    metadata = table.schema.metadata or {}
    table = complete(table.replace_schema_metadata(None), schema)
    return table if metadata.get(_INPUTS_KEY) in accepted and table.schema.equals(schema) else None


# Recovery from the logs of several attempts at the same work, some of which may still write.
#
# A suspended driver whose run was taken over may resume and continue to write. So an attempt starts with a part that
# names the other attempts that it found. Each entry holds the number from which on that attempt's parts do not count.
#
# | a part | counts |
# |---|---|
# | of an attempt that every later one found, below their numbers | yes |
# | written later: from such a number on, or by an earlier driver's attempt that was not found | never |
# | of an attempt before any that names others (earlier versions of the code) | yes |
#
# So everything from which a later attempt resumes belongs to one history. It reads finished samples before the calls
# made for them, and from an attempt that writes meanwhile it uses neither.


READERS = 8
"""Parts read in parallel: an object store takes tens of milliseconds for each."""
FOUND = b"found"
"""Key in the metadata of a part's schema. The value is a JSON object of numbers by the names of attempts."""


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
    """Rows of each part; None if nothing in it counts."""
    found: Mapping[str, int]
    """Number of each attempt below which its parts count. The next part that is written stores it."""


def recover(store: Store, parts: Sequence[Part], schema: pa.Schema, accepted: Collection[bytes]) -> Recovered:
    """Read the parts of a log by other attempts. Rows made from inputs with a digest in `accepted` count."""
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
    """Return the metadata of the part that names the attempts found; None if no other attempt can be writing."""
    if not recovered.found and layout.attempt_epoch(attempt) <= 1:
        return None
    return {FOUND: json.dumps(dict(recovered.found), sort_keys=True).encode()}


def _limits(name: str, said: Mapping[str, Mapping[str, int]]) -> list[float]:
    """Return the numbers from which on an attempt's parts do not count.

    The numbers come from the other attempts of the same driver or of later ones.
    """
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
        raise Damaged(f"{path} is not in Cairn's format: it does not list the parts that it found")
    return said


PACE = 0.08
"""Seconds between two parts, so that items that finish one by one share a part."""


class PacedWriter:
    """Writer of a log in a background thread. As a context manager it closes itself.

    `append` and `close` raise the error that stopped the background thread, if any.
    """

    def __init__(self, write: Callable[[int, list[Any]], None], what: str, deadline: float = 120.0) -> None:
        """Start the background thread.

        Args:
            write: `write(number, items)` makes a part durable.
            what: what it writes, for messages.
            deadline: greatest number of seconds for `close`.
        """
        self._write = write
        self._what = what
        self._deadline = deadline
        self._changed = threading.Condition()
        self._waiting: list[Any] = []
        self._then: list[tuple[Callable[[], None], Callable[[], None]]] = []
        """What to call when everything appended before is durable, and what if it never will be."""
        self._urgent = False
        self._closed = False
        self._error: Exception | None = None
        # A daemon, so that an ending process does not wait for a store that does not respond.
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

    def append(
        self,
        *finished: Any,
        then: Callable[[], None] | None = None,
        otherwise: Callable[[], None] = lambda: None,
        urgent: bool = False,
    ) -> None:
        """Queue finished items and return at once.

        Args:
            finished: the items.
            then: called in the writer's thread when these items and all before them are durable.
            otherwise: called in place of `then` if an error stops the writer before.
            urgent: write the next part without waiting for further items, because a caller waits for it.
        """
        with self._changed:
            self._raise_error()
            if self._closed:
                raise ValueError("the log is closed")
            self._waiting += finished
            if then is not None:
                self._then.append((then, otherwise))
            self._urgent |= urgent
            self._changed.notify()

    def require_intact(self) -> None:
        """Raise the error that stopped the writer, if there was one."""
        with self._changed:
            self._raise_error()

    @property
    def broken(self) -> bool:
        """Whether an error has stopped the writer. Then nothing more becomes durable."""
        return self._error is not None

    def close(self) -> None:
        """Wait until everything appended is durable. Raises StoreError if that takes longer than the deadline."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._writer.join(self._deadline)
        with self._changed:
            self._raise_error()
        if self._writer.is_alive():
            raise StoreError(f"writing {self._what} did not finish within {self._deadline:.0f} s")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_parts(self) -> None:
        then: list[tuple[Callable[[], None], Callable[[], None]]] = []
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
                while then:
                    then.pop(0)[0]()
        except Exception as error:
            with self._changed:
                self._error = error
                callers = [*then, *self._then]
            for _, otherwise in callers:
                with suppress(Exception):  # a failing caller must not keep the others waiting
                    otherwise()


# Lifetime of the parts of a stream's logs: a part is useful as long as one of its groups is open.


class GroupParts:
    """Parts of one log with their open groups. Not thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._groups: dict[str, set[int]] = {}

    def add(self, path: str, groups: Iterable[int]) -> None:
        """Register a part with rows of these open groups."""
        self._groups[path] = set(groups)

    def forget(self, groups: Collection[int]) -> None:
        """Remove groups that a commit contains. Delete the parts whose rows are no longer needed."""
        for ids in self._groups.values():
            ids.difference_update(groups)
        self.remove_used_up()

    def remove_used_up(self) -> None:
        """Delete the parts without open groups. If the store fails, a later driver deletes what is left."""
        paths = [path for path, ids in self._groups.items() if not ids]
        with suppress(StoreError):
            for path in paths:
                self._store.delete(path)
                del self._groups[path]
