"""Logs of rows that are durable before a commit contains them: of a step, or of a stream.

A step's log is useless once the step is committed: its parts, and those of earlier attempts, are deleted then. A
stream's log lasts as long as its driver: a part is deleted when commits contain all of its groups.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, ClassVar

import pyarrow as pa

from cairn.storage.ledger import layout
from cairn.storage.ledger.schemas import ROLLOUT
from cairn.storage.ledger.snapshots import AttemptFolder
from cairn.storage.logs.paced import PacedWriter
from cairn.storage.logs.parts import Part, part_bytes, recover
from cairn.storage.store.errors import StoreError
from cairn.storage.store.store import Store

LOG_IS_OPEN = -1
"""In place of a group of a stream's part: the part stays until its log is closed."""


class Log(PacedWriter):
    """Log of one attempt. Use it as a context manager. Subclasses name parts and choose the rows that count."""

    contents: ClassVar[str]
    """Contents of the log, for messages."""

    def __init__(
        self,
        attempt: AttemptFolder,
        inputs_digest: str,
        *,
        schema: pa.Schema = ROLLOUT,
        encode: Callable[[list[Any]], pa.Table] = pa.concat_tables,
        earlier_digests: Collection[str] = (),
        groups: Collection[int] | None = None,
        deadline: float = 120.0,
    ) -> None:
        """Begin the log.

        Args:
            attempt: folder of the attempt, or of a stream's driver.
            inputs_digest: digest of everything that the rows depend on; only parts made from the same inputs are
                recovered.
            schema: schema of the rows.
            encode: converts appended items to rows, in the log's own thread; by default the items are tables.
            earlier_digests: digests of the same inputs by the rules of earlier versions of the code.
            groups: of a stream, the groups that no step has taken; parts and rows of other groups are useless. None for
                the log of a step.
            deadline: greatest number of seconds for `close`.
        """
        self._attempt = attempt
        self._inputs_digest = inputs_digest
        self._accepted = {digest.encode() for digest in (inputs_digest, *earlier_digests)}
        self._schema = schema
        self._encode = encode
        self._groups = None if groups is None else frozenset(groups)
        self._open_parts = _OpenParts(attempt.store)
        """Parts of a stream's log. After the start only the writer's thread uses it."""
        self._written = [schema.empty_table()]
        self._numbers = count()
        super().__init__(self._write_rows, f"{self.contents} to {attempt.folder}", deadline)

    def appended(self) -> pa.Table:
        """Close the log of a step and return the rows of everything that was appended, once they are durable."""
        self.close()
        return pa.concat_tables(self._written)

    def forget(self, groups: Iterable[int]) -> None:
        """Drop the rows of a stream's groups that a commit contains, including rows that are still queued."""
        self.append(then=partial(self._open_parts.forget, set(groups)))

    def close(self) -> None:
        """Wait until everything appended is durable; remove empty folders of a stream. Raises StoreError."""
        super().close()
        if self._groups is not None:
            self._open_parts.forget({LOG_IS_OPEN})
            with suppress(StoreError):
                self._attempt.store.remove_empty_folders(self._attempt.attempts)

    def _part_name(self, number: int) -> str:
        """Return the name of a part within the attempt's folder, without digest and ending."""
        raise NotImplementedError

    def _attempts(self) -> list[str]:
        """Return the names of all other attempts at the same work."""
        attempt = self._attempt
        names = map(layout.parse_attempt, attempt.store.list(attempt.attempts))
        return [
            name
            for name in names
            if name is not None and name != attempt.name and layout.attempt_shard(name) == attempt.shard
        ]

    def _recovered(self, parts: list[Part]) -> list[tuple[Part, pa.Table]]:
        """Read parts of other attempts. Return the rows of each part that count, those of open groups alone.

        The next part of this log names what was found.
        """
        recovered, metadata = recover(self._attempt, parts, self._schema, self._accepted)
        if metadata is not None and self._groups != frozenset():
            self._write_part(self._schema.empty_table(), metadata)
        tables = []
        for part, table in recovered:
            groups = set() if table is None else set(table["group_id"].to_pylist())
            if table is not None and self._groups is not None:
                groups &= self._groups
                table = table.filter(pa.array([id in groups for id in table["group_id"].to_pylist()], pa.bool_()))
            self._retain(part.path, groups)
            if table is not None:
                tables.append((part, table))
        self._open_parts.remove_used_up()
        return tables

    def _write_rows(self, items: list[Any]) -> pa.Table:
        table = self._encode(items)
        self._write_part(table)
        if self._groups is None:
            self._written.append(table)
        return table

    def _write_part(
        self,
        table: pa.Table,
        metadata: Mapping[bytes, bytes] | None = None,
        groups: Collection[int] | None = None,
    ) -> None:
        """Write a part. `groups`: its open groups, by default those of its rows; all of the stream if it has none."""
        sha256, data = part_bytes(table, self._inputs_digest, metadata)
        path = self._attempt.path(f"{self._part_name(next(self._numbers))}.{sha256}.arrow")
        self._attempt.store.write(path, data)
        self._retain(path, groups or table["group_id"].to_pylist() or self._groups or ())

    def _retain(self, path: str, groups: Iterable[int]) -> None:
        """Keep a part until its step is committed, or as long as one of its groups is open."""
        if self._groups is None:
            self._attempt.superseded.append(path)
        else:
            self._open_parts.add(path, groups)


class _OpenParts:
    """Parts of a stream's log with their open groups. Not thread-safe."""

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
