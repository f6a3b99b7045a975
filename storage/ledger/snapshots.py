"""The files of a step's attempt. They exist for nobody until a commit names them with their digests."""

import base64
import hashlib
import io
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import OutputFile
from cairn.storage.ledger.decisions import Decisions, redacted_files
from cairn.storage.ledger.manifest import read_manifest
from cairn.storage.ledger.schemas import NOT_MADE, SCHEMAS, complete
from cairn.storage.store.errors import Damaged, Retired, StoreError
from cairn.storage.store.store import Store, StoredFile, check_path

# Tables as Parquet bytes: small, and equal for equal tables.


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


PARTS = "write_ahead"
"""Folder within an attempt's, of groups that are finished: see `cairn.storage.logs.write_ahead`."""


class AttemptFolder:
    """A fresh folder for the files of one attempt at something that is committed."""

    def __init__(self, store: Store, beside: str, name: str, *, root: str, shard: str | None = None):
        self.store = store
        self.beside = beside
        """Store path of the folder that all attempts lie in, those of a step's shards included."""
        self.name = name
        self.shard = shard
        self.folder = f"{beside}/{layout.check_name(name, 'attempt')}"
        """Store path of the folder, for engines that write files of their own."""
        self.superseded: list[str] = []
        """Store paths of write-ahead parts that nobody needs once this attempt is committed."""
        self._root = root

    def path(self, name: str) -> str:
        """Store path of a file of this attempt."""
        return f"{self.folder}/{check_path(name)}"

    def write_table(self, name: str, table: pa.Table) -> OutputFile:
        """Write a table as Parquet. What it holds is digested meanwhile, which means to encode it a second time."""
        with ThreadPoolExecutor(1, thread_name_prefix="digest") as beside:
            digesting = beside.submit(content_digest, table)
            data = to_parquet(table)
            self.store.write(self.path(name), data)
            sha256 = hashlib.sha256(data).hexdigest()
            content = digesting.result()
        return OutputFile(
            path=self._within_root(name), bytes=len(data), rows=table.num_rows, sha256=sha256, content=content
        )

    def adopt(self, file: StoredFile) -> OutputFile:
        """Describe a file that someone else, such as an engine, wrote into the folder. It is not read: a checkpoint may
        be larger than what one process reads in an hour. Raises FileNotFoundError if it is not there."""
        name = file.path.removeprefix(f"{self.folder}/")
        if not self.store.exists(self.path(name)):
            raise FileNotFoundError(f"{self.path(name)} is not in the store, although its writer says so")
        return OutputFile(path=self._within_root(name), bytes=file.bytes, sha256=file.sha256)

    def discard_superseded(self) -> None:
        """Remove the write-ahead parts that a commit made useless, in the background and as far as it succeeds:
        whatever is left, a collector removes."""
        paths, self.superseded = self.superseded, []
        if paths:
            threading.Thread(target=_delete_all, args=(self.store, paths), name="discard-parts", daemon=True).start()

    def discard(self) -> None:
        """Remove what the attempt wrote, as far as that succeeds: nobody will commit it, and a disk may be full of it.
        Finished groups stay, for the next attempt to take over."""
        parts = f"{self.path(PARTS)}/"
        with suppress(StoreError):
            for path in self.store.find(self.folder):
                if not path.startswith(parts):
                    self.store.delete(path)
            for write in self.store.unfinished(self.folder):
                if not write.path.startswith(parts):
                    self.store.discard(write)
            self.store.remove_empty_folders(self.folder)

    def _within_root(self, name: str) -> str:
        return self.path(name).removeprefix(f"{self._root}/")


class Attempt(AttemptFolder):
    """That of one attempt at a step of a run."""

    def __init__(self, store: Store, run: str, iteration: int, step: str, shard: str | None, name: str):
        beside = layout.attempts(run, iteration, step)
        super().__init__(store, beside, name, root=layout.run(run), shard=shard)
        self.run = run
        self.iteration = iteration
        self.step = step


def _delete_all(store: Store, paths: list[str]) -> None:
    with suppress(StoreError):
        for path in paths:
            store.delete(path)


def read_bytes(store: Store, run: str, output: OutputFile) -> bytes:
    """A committed file. Raises Damaged, naming it, if it is missing or not what was committed, and Retired."""
    path = layout.in_run(run, output.path)
    try:
        data = store.read(path)
    except FileNotFoundError:
        if is_retired(store, run, path):
            raise Retired(f"{path} is retired: run {run!r} does not keep its older files for ever") from None
        raise Damaged(f"{path} is committed but missing; expected {output.bytes} bytes") from None
    sha256 = hashlib.sha256(data).hexdigest()
    if not is_redacted(store, run, output, len(data), sha256):
        check_bytes(path, output, len(data), sha256)
    return data


def is_redacted(store: Store, run: str, output: OutputFile, size: int, sha256: str) -> bool:
    """Whether a file is other than committed since a person had it redacted, and is what it is to be instead. Asks only
    where it is other than committed."""
    if (size, sha256) == (output.bytes, output.sha256):
        return False
    versions = redacted_files(Decisions(store, read_manifest(store, run)).all()).get(output.path, ())
    return any((size, sha256) == (file.new_bytes, file.new_sha256) for _, file in versions)


def is_retired(store: Store, run: str, path: str) -> bool:
    """Whether retention has removed a file of a run, given by its store path, or is about to. One request."""
    place = layout.parse_file(run, path)
    return place is not None and store.exists(layout.retired(run, place[0], layout.Kind.of(place[1])))


def check_bytes(path: str, output: OutputFile, size: int, sha256: str) -> None:
    """Raise Damaged unless size and digest found at a path are those committed."""
    if (size, sha256) != (output.bytes, output.sha256):
        raise Damaged(
            f"{path} is not what was committed: expected {output.bytes} bytes with sha256 {output.sha256}, "
            f"found {size} bytes with sha256 {sha256}"
        )


def read_table(store: Store, run: str, output: OutputFile, columns: Sequence[str] | None = None) -> pa.Table:
    """A committed table, or some of its columns. Raises Damaged, naming the file, if it is missing or not what was
    committed (the whole file is checked whatever columns are wanted), and Retired. Columns that the step's table has
    got since are null."""
    table = read_recorded_table(store, run, output, columns)
    place = layout.parse_file(run, layout.in_run(run, output.path))
    if place is not None and place[1] in SCHEMAS:
        table = complete(table, SCHEMAS[place[1]])
    return table if columns is None else table.select(list(columns))


def read_recorded_table(store: Store, run: str, output: OutputFile, columns: Sequence[str] | None = None) -> pa.Table:
    """A committed table with the columns that it was written with, or those of them that are wanted. Raises as
    `read_table` does."""
    data = read_bytes(store, run, output)
    try:
        return from_parquet(data, columns)
    except ValueError as error:
        raise Damaged(f"{layout.in_run(run, output.path)} is not what Cairn writes: {error}") from error
