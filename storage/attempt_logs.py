"""What counts of logs that several attempts at the same have kept, where some of them still write.

A driver that was suspended while another took its run over wakes and goes on writing. So who begins says what it has
found: its first part names the other attempts, each with the number from which on its parts do not count.

| a part | counts |
|---|---|
| of an attempt that every later one had found, below the numbers that they say | yes |
| that was written since: from such a number on, or of an attempt of an earlier driver that was not found | never |
| of attempts before any that say so (of earlier versions of the code) | yes |

So all that a later attempt goes on from is of one history: it reads what ended before what was called for it, and of
whoever writes meanwhile neither.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from typing import Any

import pyarrow as pa

from cairn.storage import layout
from cairn.storage.canonical import from_json
from cairn.storage.errors import Damaged
from cairn.storage.store import Store
from cairn.storage.write_ahead_parts import accepted_rows, read_any_part

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
