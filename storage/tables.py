"""Tables as Parquet bytes: small, and equal for equal tables."""

import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq


def to_parquet(table: pa.Table) -> bytes:
    """A table as one Parquet file."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def from_parquet(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """The table, or some of its columns. Raises pa.ArrowInvalid or OSError if the bytes are no Parquet file."""
    return pq.read_table(pa.BufferReader(data), columns=None if columns is None else list(columns))
