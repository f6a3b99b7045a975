"""Rows of a JSONL or Parquet file at any fsspec URL: the data source `files`."""

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from cairn.storage.canonical import from_json
from cairn.storage.errors import NoSpace
from cairn.storage.space import naming_full
from cairn.tasks.data.errors import BadData

Binary = io.BufferedReader | io.BufferedRandom

_PARQUET_ROWS = 1024
"""Rows that are converted at a time."""


def rows(path: str) -> Iterator[Mapping[str, Any]]:
    """Row after row, all columns, as JSON values. Raises BadData where the file is missing, of another kind or torn."""
    with open_file(path) as file:
        if is_parquet(path):
            for row in parquet_rows(file, path, lambda present: present):
                yield json.loads(json.dumps(row, default=str))  # times and the like as text
            return
        for number, line in enumerate(file, 1):
            if not line.isspace():
                yield parsed(line, f"{path}, line {number}")


def is_parquet(url: str) -> bool:
    """By the end of its name."""
    return _suffix(url) == ".parquet"


def open_file(url: str, kinds: Sequence[str] = (".jsonl", ".parquet")) -> Binary:
    """The bytes of a file whose name ends in one of `kinds`: a local one itself, else an unnamed temporary copy. Raises
    BadData, and NoSpace where the copy does not fit on this machine."""
    if _suffix(url) not in kinds:
        raise BadData(f"{url} is neither a {' nor a '.join(kinds)} file: convert it to one of them")
    try:
        return _local_copy(url)
    except FileNotFoundError:
        raise BadData(f"{url} does not exist: correct the path") from None
    except IsADirectoryError:
        raise BadData(f"{url} is a folder: give the path of a {' or '.join(kinds)} file") from None
    except NoSpace:
        raise
    # Every file system of fsspec raises exceptions of its own, and so do the libraries below it.
    except Exception as error:
        raise BadData(f"{url} cannot be read ({error}): check the path and the access to it") from error


def parsed(line: bytes, where: str) -> dict[str, Any]:
    """The row that a line of JSONL holds. Raises BadData."""
    try:
        row = from_json(line)
    except ValueError as error:
        raise BadData(f"{where} is not JSON ({error}): correct or remove the line") from None
    if not isinstance(row, dict):
        raise BadData(f"{where} holds {type(row).__name__} instead of an object with named fields")
    return row


def parquet_rows(file: Binary, url: str, choose: Callable[[list[str]], list[str]]) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file. `choose`: of the columns that are there, those that are read. Raises BadData."""
    try:
        parquet = pq.ParquetFile(file)
        read = choose(parquet.schema_arrow.names)
        for name in read:
            if not _is_plain(parquet.schema_arrow.field(name).type):  # it may read its values by unpickling
                raise BadData(f"{url} has a column {name!r} of a type of some library's own: write it as a plain one")
        for batch in parquet.iter_batches(_PARQUET_ROWS, columns=read):
            yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise BadData(f"{url} is not a whole Parquet file ({error}): copy it again") from error


def _suffix(url: str) -> str:
    return os.path.splitext(urlsplit(url).path if "://" in url else url)[1]


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


def _is_plain(kind: pa.DataType) -> bool:
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return not isinstance(kind, pa.ExtensionType) and all(map(_is_plain, inner))
