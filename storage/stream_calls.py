"""The log of calls of a run that streams: what the code of samples that no step has taken was given.

A driver keeps one beside its log of those samples (`cairn.storage.stream_log`), from its start to its end:
```
runs/<run>/stream/000003-5f0c…/write_ahead/calls/0002-000000.<sha256>.arrow
```
It is as the one of a step (`cairn.storage.call_log`), drivers in place of the step's attempts, but for this: a part
goes when commits have all of its groups.
"""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cairn.storage.call_log import CallLog
from cairn.storage.group_parts import GroupParts
from cairn.storage.snapshots import AttemptFolder


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
