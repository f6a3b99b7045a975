"""Data source `files`: rows of a JSONL or Parquet file at any fsspec URL."""

import base64
import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from cairn.configs.errors import BadData
from cairn.storage.store.canonical import from_json
from cairn.storage.store.errors import NoSpace, naming_full

Binary = io.BufferedReader | io.BufferedRandom

_PARQUET_ROWS = 1024
"""Rows that are converted at a time."""


def rows(path: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows with all columns, as JSON values. Bytes of Parquet that are not text become data URLs. Raises
    BadData where the file is missing, has another format or is torn."""
    with open_file(path) as file:
        if is_parquet(path):
            yield from parquet_rows(file, path, lambda present: present, None)
            return
        for number, line in enumerate(file, 1):
            if not line.isspace():
                yield parsed(line, f"{path}, line {number}")


def is_parquet(url: str) -> bool:
    """Whether a file is Parquet, by the suffix of its name."""
    return _suffix(url) == ".parquet"


def open_file(url: str, kinds: Sequence[str] = (".jsonl", ".parquet")) -> Binary:
    """Open a file whose name ends in one of `kinds`: a local file itself, otherwise an unnamed temporary copy. Raises
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
    # Each fsspec file system, and each library below it, raises its own exceptions.
    except Exception as error:
        raise BadData(f"{url} cannot be read ({error}): check the path and the access to it") from error


def parsed(line: bytes, where: str) -> dict[str, Any]:
    """Return the row in a line of JSONL. Raises BadData."""
    try:
        row = from_json(line)
    except ValueError as error:
        raise BadData(f"{where} is not JSON ({error}): correct or remove the line") from None
    if not isinstance(row, dict):
        raise BadData(f"{where} holds {type(row).__name__} instead of an object with named fields")
    return row


def parquet_rows(
    file: Binary, url: str, choose: Callable[[list[str]], list[str]], pictures: Collection[str] | None = ()
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as JSON values. Raises BadData.

    Args:
        choose: maps the columns of the file to those that are read.
        pictures: columns whose bytes become data URLs; None means that any column may contain pictures. Other bytes are
            UTF-8 text.
    """
    number = 0
    try:
        parquet = pq.ParquetFile(file)
        read = choose(parquet.schema_arrow.names)
        for name in read:
            if not _is_plain(parquet.schema_arrow.field(name).type):  # it may read its values by unpickling
                raise BadData(f"{url} has a column {name!r} of a library's extension type: write it as a plain type")
        batches = parquet.iter_batches(_PARQUET_ROWS, columns=read)
        rows = (row for batch in batches for row in batch.to_pylist(maps_as_pydicts="strict"))
        for number, row in enumerate(rows, 1):  # noqa: B007 an exception tells it
            yield {name: _json_value(value, name, pictures) for name, value in row.items()}
    except BadData:
        raise
    except _NoText as error:
        raise BadData(
            f"{url}, row {number}: {error} holds bytes that are not UTF-8 text: write the column as text"
        ) from None
    # The library raises its own exceptions, OSError and others, and so do the codecs below it.
    except Exception as error:
        raise BadData(f"{url} is not a whole Parquet file ({error}): copy it again") from error


class _NoText(Exception):
    """Bytes in a column that are not text. The message is the column's name."""


def _json_value(value: Any, column: str, pictures: Collection[str] | None) -> Any:
    """Convert a value of Parquet to JSON. A struct's null fields are left out, because Arrow adds to each struct of a
    column all fields that any of them has. Times and similar values become text, as Python writes them."""
    match value:
        case None | str() | int() | float():
            return value
        case dict():
            fields = value.items()
            return {name: _json_value(field, column, pictures) for name, field in fields if field is not None}
        case list():
            return [_json_value(one, column, pictures) for one in value]
        case bytes():
            with contextlib.suppress(UnicodeDecodeError):
                if pictures is None or column not in pictures:
                    return value.decode()
            if pictures is not None and column not in pictures:
                raise _NoText(repr(column))
            return f"data:;base64,{base64.b64encode(value).decode()}"
        case Decimal() if value.is_finite() and value == value.to_integral_value():
            return int(value)
    return str(value)


def _suffix(url: str) -> str:
    """Return the suffix of a URL's name. Only HTTP URLs have queries and fragments after the name, and S3 URLs
    versions."""
    name = urlsplit(url).path if url.startswith(("http://", "https://")) else url.partition("?versionId=")[0]
    return os.path.splitext(name)[1]


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
