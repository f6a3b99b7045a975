"""The rows that a data source gives, read by index without holding them in memory.

Opening a source reads it once: what it gives is hashed, every row is checked, and the place of each row is noted. Rows
are then read from local disk: from the file itself if it is a local JSONL file, else from an unnamed temporary copy
with one JSON object a line, which goes away with the process.

A source is a file in this folder with `rows(path)`, or a function of the user's: it gives mappings of JSON values, the
same ones in the same order whenever it is asked. A run records their digest, and is not resumed with others.
"""

import hashlib
import json
import os
import re
import tempfile
import threading
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from cairn.configs.kinds import SOURCE
from cairn.storage.canonical import from_json
from cairn.storage.errors import NoSpace
from cairn.storage.space import naming_full
from cairn.tasks.data.errors import BadData
from cairn.tasks.data.files import Binary, is_parquet, open_file, parquet_rows, parsed

Check = Callable[[dict[str, Any], str], object]
"""Looks at one row and raises BadData; the second argument says where the row stands."""

FILES = "files"
"""The source that reads files. The digest of one is that of its bytes, and a local JSONL file is not copied."""

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")


class RowFile:
    """The rows of one source or of a slice of it. Thread-safe."""

    def __init__(self, path: str, lines: Binary, offsets: array, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
        """sha256, in hex, of all that the source gives: of a file, its bytes."""
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
        row: dict[str, Any] = from_json(line)
        return row


def open_rows(
    source: str,
    path: str,
    required: Mapping[str, str],
    optional: Collection[str],
    check: Check,
    pictures: Collection[str] = (),
) -> RowFile:
    """Open what `source` gives for `path`, which may end in a slice such as `@[100:200]` or `@[-50:]`, and check each
    of its rows.

    `required` maps the fields that every row must have to the options that name them; a Parquet file's other columns
    are not read, unless they are `optional`. Rows outside the slice are checked too. `pictures`: columns whose bytes
    are no text, see `files.parquet_rows`.

    Raises:
        BadData: the source fails or gives something else than rows; a file is missing, empty, of another kind or torn,
            lacks a field, the slice has no row, or `check` says so.
        BadPlugin: there is no such source.
        NoSpace: the temporary copy does not fit on this machine.
    """
    match = _SLICE.fullmatch(path)
    url = match["path"] if match else path
    if source == FILES:
        lines = open_file(url)
        fingerprint = hashlib.file_digest(lines, "sha256").hexdigest()
        if is_parquet(url):
            columns = partial(_columns, required=required, optional=optional, url=url)
            lines = _spooled(parquet_rows(lines, url, columns, pictures))
    else:
        lines = _spooled(_given(source, url))
        lines.seek(0)
        fingerprint = hashlib.file_digest(lines, "sha256").hexdigest()
    offsets = _index(lines, url, "line" if source == FILES and not is_parquet(url) else "row", required, check)
    if not offsets:
        raise BadData(f"{url} has no rows: give at least one")
    if match:
        start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
        total, offsets = len(offsets), offsets[start:stop]
        if not offsets:
            raise BadData(f"{path} selects none of the {total} rows: correct the slice")
    return RowFile(path, lines, offsets, fingerprint)


def without_slice(path: str) -> str:
    """A path without the slice that it may end in."""
    match = _SLICE.fullmatch(path)
    return match["path"] if match else path


def _given(source: str, path: str) -> Iterator[dict[str, Any]]:
    """What a function of the user's gives."""
    function, number = SOURCE.load(source), 0
    try:
        for number, row in enumerate(function(path), 1):
            if not isinstance(row, Mapping):
                given = type(row).__name__
                raise BadData(f"the data source {source!r} gave {given} as row {number} of {path}: let it be a mapping")
            yield dict(row)
    except (BadData, NoSpace):
        raise
    # Whatever user code raises is the user's to see.
    except Exception as error:
        raise BadData(
            f"the data source {source!r} failed on {path} after {number} rows with {error!r}: correct it"
        ) from error


def _spooled(rows: Iterable[Mapping[str, Any]]) -> Binary:
    """One JSON object a line."""
    lines = tempfile.TemporaryFile()  # noqa: SIM115 it lives as long as the rows are read
    with naming_full(tempfile.gettempdir()):
        for number, row in enumerate(rows, 1):
            try:
                lines.write(json.dumps(row).encode() + b"\n")
            except (TypeError, ValueError, RecursionError) as error:
                raise BadData(f"row {number} is not JSON ({error}): let the data source give JSON values") from None
        lines.flush()
    return lines


def _columns(present: list[str], *, required: Mapping[str, str], optional: Collection[str], url: str) -> list[str]:
    _require(present, required, url)
    return [name for name in present if name in required or name in optional]


def _index(file: Binary, url: str, unit: str, required: Mapping[str, str], check: Check) -> array:
    """Byte offset of each row; blank lines are none."""
    offsets, offset = array("Q"), 0
    file.seek(0)
    for number, line in enumerate(file, 1):
        if not line.isspace():
            where = f"{url}, {unit} {number}"
            row = parsed(line, where)
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
