"""Rows of a JSONL or Parquet file at any fsspec URL, read by index without holding the file in memory.

Opening a file reads it once: its bytes are hashed, every row is checked, and the place of each row is noted. Rows are
then read from local disk: from the file itself if it is a local JSONL file, else from an unnamed temporary copy with
one JSON object a line, which goes away with the process.
"""

import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import threading
import weakref
from array import array
from collections.abc import Callable, Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from cairn.storage.errors import NoSpace
from cairn.storage.space import naming_full

Check = Callable[[dict[str, Any], str], object]
"""Looks at one row and raises BadData; the second argument says where the row stands."""

Binary = io.BufferedReader | io.BufferedRandom

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")
_PARQUET_ROWS = 1024
"""Rows that are converted at a time."""


class BadData(Exception):
    """The data cannot be used as the configuration says; a new try will not help. The message says what to do."""


class BadPrompt(BadData):
    """A row that gives no prompt; the others may."""


class RowFile:
    """The rows of one file or of a slice of it. Thread-safe."""

    def __init__(self, path: str, lines: Binary, offsets: array, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
        """sha256, in hex, of the whole file's bytes."""
        self._lines = lines
        self._offsets = offsets
        self._unchanged = _stamp(lines)
        self._lock = threading.Lock()
        weakref.finalize(self, lines.close)

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> dict[str, Any]:
        """The row at `index`, from 0. Raises BadData if the file was changed in place since it was opened."""
        with self._lock:
            if _stamp(self._lines) != self._unchanged:
                raise BadData(f"{self.path} was changed while it was in use: put the old file back, or start a new run")
            self._lines.seek(self._offsets[index])
            line = self._lines.readline()
        row: dict[str, Any] = json.loads(line)
        return row


def open_rows(path: str, required: Mapping[str, str], optional: Collection[str], check: Check) -> RowFile:
    """Open `path`, which may end in a slice such as `@[100:200]` or `@[-50:]`, and check each of its rows.

    `required` maps the fields that every row must have to the options that name them; a Parquet file's other columns
    are not read, unless they are `optional`. Rows outside the slice are checked too.

    Raises:
        BadData: the file is missing, empty, of another kind or torn, lacks a field, the slice has no row, or `check`
            says so.
        NoSpace: the temporary copy does not fit on this machine.
    """
    match = _SLICE.fullmatch(path)
    url = match["path"] if match else path
    suffix = os.path.splitext(urlsplit(url).path if "://" in url else url)[1]
    if suffix not in (".jsonl", ".parquet"):
        raise BadData(f"{url} is neither a .jsonl nor a .parquet file: convert it to one of them")
    try:
        file = _local_copy(url)
    except FileNotFoundError:
        raise BadData(f"{url} does not exist: correct the path") from None
    except IsADirectoryError:
        raise BadData(f"{url} is a folder: give the path of a .jsonl or .parquet file") from None
    except NoSpace:
        raise
    # Every file system of fsspec raises exceptions of its own, and so do the libraries below it.
    except Exception as error:
        raise BadData(f"{url} cannot be read ({error}): check the path and the access to it") from error
    fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
    if suffix == ".parquet":
        with naming_full(tempfile.gettempdir()):
            file = _as_lines(file, url, required, optional)
    offsets = _index(file, url, "line" if suffix == ".jsonl" else "row", required, check)
    if not offsets:
        raise BadData(f"{url} has no rows: give a file with at least one")
    if match:
        start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
        total, offsets = len(offsets), offsets[start:stop]
        if not offsets:
            raise BadData(f"{path} selects none of the {total} rows: correct the slice")
    return RowFile(path, file, offsets, fingerprint)


def _local_copy(url: str) -> Binary:
    filesystem, location = fsspec.url_to_fs(url)
    if isinstance(filesystem, LocalFileSystem):
        return open(location, "rb")
    with naming_full(tempfile.gettempdir()):
        copy = tempfile.TemporaryFile()  # noqa: SIM115 it lives as long as the rows are read
        with filesystem.open(location, "rb") as remote:
            shutil.copyfileobj(remote, copy, 1024**2)
        copy.seek(0)
    return copy


def _as_lines(file: Binary, url: str, required: Mapping[str, str], optional: Collection[str]) -> Binary:
    lines = tempfile.TemporaryFile()  # noqa: SIM115 it lives as long as the rows are read
    try:
        parquet = pq.ParquetFile(file)
        present = parquet.schema_arrow.names
        _require(present, required, url)
        read = [name for name in present if name in required or name in optional]
        for name in read:
            if not _is_plain(parquet.schema_arrow.field(name).type):  # it may read its values by unpickling
                raise BadData(f"{url} has a column {name!r} of a type of some library's own: write it as a plain one")
        for batch in parquet.iter_batches(_PARQUET_ROWS, columns=read):
            for row in batch.to_pylist():
                lines.write(json.dumps(row, default=str).encode() + b"\n")
        lines.flush()
    except pa.ArrowException as error:
        raise BadData(f"{url} is not a whole Parquet file ({error}): copy it again") from error
    return lines


def _is_plain(kind: pa.DataType) -> bool:
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return not isinstance(kind, pa.ExtensionType) and all(map(_is_plain, inner))


def _index(file: Binary, url: str, unit: str, required: Mapping[str, str], check: Check) -> array:
    """Byte offset of each row; blank lines are none."""
    offsets, offset = array("Q"), 0
    file.seek(0)
    for number, line in enumerate(file, 1):
        if not line.isspace():
            where = f"{url}, {unit} {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise BadData(f"{where} is not JSON ({error}): correct or remove the line") from None
            if not isinstance(row, dict):
                raise BadData(f"{where} holds {type(row).__name__} instead of an object with named fields")
            _require(row, required, where)
            check(row, where)
            offsets.append(offset)
        offset += len(line)
    return offsets


def _require(fields: Collection[str], required: Mapping[str, str], where: str) -> None:
    for name, option in required.items():
        if name not in fields:
            raise BadData(
                f"{where} has no field {name!r}, which {option} names; it has {', '.join(sorted(fields)) or 'none'}: "
                f"set {option} to one of these"
            )


def _stamp(file: Binary) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns
