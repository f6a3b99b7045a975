"""Tables as Parquet bytes: small, and equal for equal tables."""

import base64
import hashlib
import io
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cairn.storage.schemas import NOT_MADE

_NOISY = ("log_probs", "ref_log_probs", "teacher_log_probs", "teacher_top_log_probs", "values")
"""Their mantissas are noise: only with the bytes of one significance together do sign and exponent compress."""
_PARQUET_END, _IPC_END = 8, 10
"""Bytes after the footer, where the schema is: its length and the name of the format."""
_EXTENSION = b"ARROW:extension"
"""Begins what the schema says of a column of a type that some library registered. Arrow writes it as it is;"""
_EXTENSION_IN_BASE64 = [
    base64.b64encode(bytes(shift) + _EXTENSION)[-(-shift * 4 // 3) :][: (len(_EXTENSION) * 8 - 12) // 6]
    for shift in range(3)
]
"""Parquet holds Arrow's schema in base64, where it may begin at any of three places; the characters at both ends, which
hold bits of its neighbours too, are left out."""
_AT_ONCE = 2**20
"""Bytes that are asked for at a time at least, where not all of a file is read."""
_PAGE_BYTES = 8 * 2**20
"""Of a page: the window in which zstd finds text and tokens again that other samples have too."""


def to_parquet(table: pa.Table) -> bytes:
    """A table as one Parquet file.

    zstd without dictionaries: constant token columns (masks, versions, advantages) cost nearly nothing, and token ids
    and text less than through a dictionary. 2,048 samples of 512 tokens take 5–6 bytes a token in all, 3.3 of them for
    float32 log-probs.
    """
    sink = io.BytesIO()
    noisy = [name for name in _NOISY if name in table.column_names]
    pq.write_table(
        table.combine_chunks().replace_schema_metadata(None),
        sink,
        compression="zstd",
        compression_level=3,
        use_dictionary=False,
        column_encoding={_numbers_of(table.schema.field(name)): "BYTE_STREAM_SPLIT" for name in noisy},
        data_page_size=_PAGE_BYTES,
        write_statistics=False,
    )
    return sink.getvalue()


def _numbers_of(field: pa.Field) -> str:
    """Where Parquet has the numbers of a list, or of a list of lists."""
    depth = 2 if pa.types.is_nested(field.type.value_type) else 1
    return field.name + depth * ".list.element"


def content_digest(table: pa.Table) -> str | None:
    """SHA-256, in hex, of what a table holds besides its measured columns; None if it has no such column."""
    measured = [name for name in table.column_names if name in NOT_MADE]
    return hashlib.sha256(to_parquet(table.drop_columns(measured))).hexdigest() if measured else None


def from_parquet(data: bytes, columns: Collection[str] | None = None) -> pa.Table:
    """The table as it was written, or of these columns the ones that it has. Raises ValueError if the bytes are no
    table of plain columns."""
    footer = data[max(0, len(data) - _PARQUET_END - int.from_bytes(data[-_PARQUET_END:-4], "little")) :]
    _require_plain(footer, _EXTENSION_IN_BASE64)  # opening the file would already read its types
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        return file.read(None if columns is None else [name for name in file.schema_arrow.names if name in columns])
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"it is not a Parquet file: {error!s:.200}") from None


def read_columns(read_range: Callable[[int, int], bytes], size: int, columns: Collection[str]) -> pa.Table:
    """Of these columns of a Parquet file the ones that it has, without the bytes of others. `read_range` gives the
    bytes from a place up to another, `size` is that of the file. Raises ValueError as `from_parquet` does, and what
    `read_range` raises."""
    if size <= _AT_ONCE:
        return from_parquet(read_range(0, size), columns)
    tail = read_range(size - _PARQUET_END, size)
    footer = read_range(max(0, size - _PARQUET_END - int.from_bytes(tail[:4], "little")), size)
    _require_plain(footer, _EXTENSION_IN_BASE64)
    try:
        with io.BufferedReader(_Ranges(read_range, size), _AT_ONCE) as ranges:
            file = pq.ParquetFile(pa.PythonFile(ranges, "r"))
            return file.read([name for name in file.schema_arrow.names if name in columns])
    except pa.ArrowException as error:
        raise ValueError(f"it is not a Parquet file: {error!s:.200}") from None


class _Ranges(io.RawIOBase):
    """A file of which only ranges are read."""

    def __init__(self, read_range: Callable[[int, int], bytes], size: int):
        self._read_range, self._size, self._at = read_range, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer)
        end = min(self._at + len(room), self._size)
        data = self._read_range(self._at, end) if end > self._at else b""
        room[: len(data)] = data
        self._at += len(data)
        return len(data)


def from_ipc(data: bytes) -> pa.Table:
    """The table of an Arrow IPC file. Raises ValueError as `from_parquet` does."""
    footer = data[max(0, len(data) - _IPC_END - int.from_bytes(data[-_IPC_END:-6], "little")) :]
    _require_plain(footer, [_EXTENSION])
    try:
        return pa.ipc.open_file(data).read_all()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"it is not an Arrow IPC file: {error!s:.200}") from None


def _require_plain(footer: bytes, marks: Iterable[bytes]) -> None:
    """A library that a process has imported may read its own types of columns by unpickling."""
    if any(mark in footer for mark in marks):
        raise ValueError("it has columns of a type of some library's own, which is never read")
