"""Parts of logs: Arrow IPC files that are written whole, whose names carry the SHA-256 of their bytes, and their
schema's metadata the digest of the inputs that the rows were made from."""

import hashlib
from collections.abc import Collection, Mapping

import pyarrow as pa

from cairn.storage import tables
from cairn.storage.errors import Damaged
from cairn.storage.schemas import complete
from cairn.storage.store import Store

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
