"""Parts of logs, and recovery from the logs of several attempts at the same work, some of which may still write.

A part is an Arrow IPC file, written whole. Its name carries the SHA-256 of its bytes, the metadata of its schema the
digest of the inputs from which the rows were made.

A suspended driver whose run was taken over may resume and continue to write. So an attempt starts with a part that
names the other attempts that it found. Each entry holds the number from which on that attempt's parts do not count.

| a part | counts |
|---|---|
| of an attempt that every later one found, below their numbers | yes |
| written later: from such a number on, or by an earlier driver's attempt that was not found | never |
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
from cairn.storage.store.canonical import from_json
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store

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

    Returns None if the part was made from inputs whose digest is not in `accepted`, or has other columns.
    """
    metadata = table.schema.metadata or {}
    table = complete(table.replace_schema_metadata(None), schema)
    alike = [(one.name, one.type) for one in table.schema] == [(one.name, one.type) for one in schema]
    return table.cast(schema) if metadata.get(_INPUTS_KEY) in accepted and alike else None


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
    found_by_attempt = {
        part.attempt: _found(part.path, table)
        for part, table in zip(parts, tables, strict=True)
        if table is not None and FOUND in (table.schema.metadata or {})
    }
    limits = {name: min(_limits(name, found_by_attempt), default=inf) for name in {part.attempt for part in parts}}
    counted = [
        (part, None if table is None or part.number >= limits[part.attempt] else accepted_rows(table, schema, accepted))
        for part, table in zip(parts, tables, strict=True)
    ]
    ends = {name: 1 + max(part.number for part in parts if part.attempt == name) for name in limits}
    return Recovered(counted, {name: int(min(limit, ends[name])) for name, limit in limits.items()})


def found_metadata(recovered: Recovered, attempt: str) -> dict[bytes, bytes] | None:
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
