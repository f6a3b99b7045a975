"""Parts of logs, and recovery from the logs of several attempts at the same work, some of which may still write.

A part is an Arrow IPC file, written whole. Its name carries the SHA-256 of its bytes, the metadata of its schema the
digest of the inputs from which the rows were made.

A suspended driver whose run was taken over may resume and continue to write. So an attempt starts with a part that
names the other attempts that it read. Each entry holds the number from which on that attempt's parts do not count.

| a part | counts |
|---|---|
| of an attempt that every later one read, below their numbers | yes |
| written later: from such a number on, or by an earlier driver's attempt that was not read | never |
| of an attempt before any that names others | yes |

So everything from which a later attempt resumes belongs to one history. It reads finished samples before the calls
made for them, and from an attempt that writes meanwhile it uses neither.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from typing import Any

import pyarrow as pa

from cairn.storage.ledger import layout
from cairn.storage.ledger import snapshots as tables
from cairn.storage.ledger.schemas import complete
from cairn.storage.ledger.snapshots import AttemptFolder
from cairn.storage.store.canonical import from_json
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import REQUESTS, Store

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
    return tables.to_ipc(table.replace_schema_metadata({_INPUTS_KEY: inputs_digest, **(metadata or {})}))


def accepted_rows(table: pa.Table, schema: pa.Schema, accepted: Collection[bytes]) -> pa.Table | None:
    """Return the rows of a part, with the columns that the schema got later.

    Returns None if the part was made from inputs whose digest is not in `accepted`, or has other columns.
    """
    metadata = table.schema.metadata or {}
    table = complete(table.replace_schema_metadata(None), schema)
    alike = [(one.name, one.type) for one in table.schema] == [(one.name, one.type) for one in schema]
    return table.cast(schema) if metadata.get(_INPUTS_KEY) in accepted and alike else None


LIMITS_KEY = b"found"
"""Key in the metadata of a part's schema. The value is a JSON object: by the names of attempts, the numbers below which
their parts count."""


@dataclass(frozen=True)
class Part:
    """A file of a log."""

    attempt: str
    number: int
    path: str


def recover(
    attempt: AttemptFolder, parts: Sequence[Part], schema: pa.Schema, accepted: Collection[bytes]
) -> tuple[list[tuple[Part, pa.Table | None]], dict[bytes, bytes] | None]:
    """Read the parts of a log by other attempts. Rows made from inputs with a digest in `accepted` count.

    Returns the rows of each part, None if nothing in it counts; and the metadata of this attempt's part that names the
    attempts read, None if no other attempt can be writing.
    """
    with ThreadPoolExecutor(REQUESTS) as readers:
        tables = list(readers.map(lambda part: read_any_part(attempt.store, part.path), parts))
    limits_by_attempt = {
        part.attempt: _recorded_limits(part.path, table)
        for part, table in zip(parts, tables, strict=True)
        if table is not None and LIMITS_KEY in (table.schema.metadata or {})
    }
    limits = {name: min(_limits(name, limits_by_attempt), default=inf) for name in {part.attempt for part in parts}}
    counted = [
        (part, None if table is None or part.number >= limits[part.attempt] else accepted_rows(table, schema, accepted))
        for part, table in zip(parts, tables, strict=True)
    ]
    if not limits and layout.attempt_epoch(attempt.name) <= 1:
        return counted, None
    ends = {name: 1 + max(part.number for part in parts if part.attempt == name) for name in limits}
    below = {name: int(min(limit, ends[name])) for name, limit in limits.items()}
    return counted, {LIMITS_KEY: json.dumps(below, sort_keys=True).encode()}


def _limits(name: str, limits_by_attempt: Mapping[str, Mapping[str, int]]) -> list[float]:
    """Return the numbers from which on an attempt's parts do not count.

    The numbers come from the other attempts of the same driver or of later ones.
    """
    epoch = layout.attempt_epoch(name)
    return [
        limits.get(name, 0)
        for other, limits in limits_by_attempt.items()
        if other != name
        and (layout.attempt_epoch(other) > epoch or (layout.attempt_epoch(other) == epoch and name in limits))
    ]


def _recorded_limits(path: str, table: pa.Table) -> dict[str, int]:
    try:
        limits: Any = from_json(table.schema.metadata[LIMITS_KEY])
    except ValueError:
        limits = None
    if not isinstance(limits, dict) or not all(isinstance(number, int) for number in limits.values()):
        raise Damaged(f"{path} is not in Cairn's format: it does not list the parts that it found")
    return limits
