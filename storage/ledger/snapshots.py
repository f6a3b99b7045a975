"""Files of a step's attempt. No reader sees them until a commit names them with their digests."""

import base64
import hashlib
import io
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import OutputFile
from cairn.storage.ledger.decisions import Decisions, redacted_files
from cairn.storage.ledger.manifest import read_manifest
from cairn.storage.ledger.schemas import ALL_MEASURED, SCHEMAS, complete
from cairn.storage.store.errors import Damaged, Retired, StoreError, StoreRefused
from cairn.storage.store.store import Store, StoredFile, check_path

# Encoding of tables as Parquet: compact, and equal tables have equal bytes.


_PARQUET_END, _IPC_END = 8, 10
"""Bytes after the footer, which holds the schema: the footer's length and the name of the format."""
_EXTENSION = b"ARROW:extension"
"""Prefix that Arrow writes into the schema of a column whose type a library registered. An Arrow IPC file holds it as
plain bytes."""
_EXTENSION_IN_BASE64 = [
    base64.b64encode(bytes(shift) + _EXTENSION)[-(-shift * 4 // 3) :][: (len(_EXTENSION) * 8 - 12) // 6]
    for shift in range(3)
]
"""Base64 forms of this prefix: Parquet stores Arrow's schema in base64. The prefix may start at any of three offsets.
The characters at both ends are left out because they also hold bits of neighbouring bytes."""
_MIN_READ_BYTES = 2**20
"""Least number of bytes of a request for a part of a file."""
_LEAST_PAGE_BYTES, _GREATEST_PAGE_BYTES = 2**20, 8 * 2**20
"""Bytes of a page of numbers. What is done to a page of 1 MB stays in the processor's cache: 4 % of the time of writing
a rollout."""
_PROMPTS_OF_A_PAGE = 512
"""Least number of prompts of mean length in a page below the greatest size: zstd finds no repetition across pages, and
the samples of a group repeat their prompt."""
_BATCH = 2**16
"""Number of values that the writer takes at once."""
_LEVELS = {"prompt_text": 3}
"""Levels of zstd by column, other than Arrow's 1. At level 1 zstd finds no repetition that is more than 512 KB back, as
between the samples of a group with a long prompt; at level 3, 2 MB."""


def to_parquet(table: pa.Table) -> bytes:
    """Return a table as one Parquet file.

    Uses zstd without dictionaries: constant token columns (masks, versions, advantages) cost almost nothing, and token
    ids and text cost less than with a dictionary. Lists of 32-bit numbers store bytes of equal significance together:
    high bytes of ids, and signs and exponents of log-probs, repeat; mantissas are noise. 2,048 samples of 512 tokens
    take 5–6 bytes a token in total, 3.3 of them for float32 log-probs.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.combine_chunks().replace_schema_metadata(None),
        sink,
        compression="zstd",
        compression_level=_LEVELS,
        use_dictionary=False,
        column_encoding={path: "BYTE_STREAM_SPLIT" for field in table.schema if (path := _numbers_path(field))},
        data_page_size=_page_bytes(table),
        write_batch_size=_BATCH,
        write_statistics=False,
    )
    return sink.getvalue().to_pybytes()


def _page_bytes(table: pa.Table) -> int:
    if "prompt_ids" not in table.column_names:
        return _LEAST_PAGE_BYTES
    prompt_tokens = pc.mean(pc.list_value_length(table["prompt_ids"])).as_py() or 0
    return min(max(int(4 * prompt_tokens * _PROMPTS_OF_A_PAGE), _LEAST_PAGE_BYTES), _GREATEST_PAGE_BYTES)


def _numbers_path(field: pa.Field) -> str | None:
    """Return the Parquet path of the numbers of a list, or of a list of lists; None unless they have 32 bits."""
    path, of = field.name, field.type
    while pa.types.is_list(of) or pa.types.is_large_list(of):
        path, of = f"{path}.list.element", of.value_type
    return path if path != field.name and of in (pa.int32(), pa.float32()) else None


def table_digests(data: bytes) -> tuple[str, str | None]:
    """Return two hexadecimal SHA-256 of a file of `to_parquet`: of its bytes; and of its content without measured
    columns, None if it has no such column.

    The content consists of the encoded bytes, names and types of the columns. Equal tables have equal digests if one
    version of the code encoded them.
    """
    file = pq.ParquetFile(pa.BufferReader(data))
    names = [(one.name, str(one.type), one.nullable) for one in file.schema_arrow if one.name not in ALL_MEASURED]
    groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
    chunks = [group.column(place) for group in groups for place in range(group.num_columns)]
    ends = [one.data_page_offset + one.total_compressed_size for one in chunks]  # no page of a dictionary is before it
    view, at, whole = memoryview(data), 0, hashlib.sha256()
    content = None
    for chunk, end in zip(chunks, ends, strict=True):
        if chunk.path_in_schema in ALL_MEASURED:
            before = view[at : chunk.data_page_offset]
            whole.update(before)
            if content is None:
                content = whole.copy()  # equal so far: these bytes are digested once
            else:
                content.update(before)
            whole.update(view[chunk.data_page_offset : end])
            at = end
    whole.update(view[at:])
    if content is not None:
        content.update(view[at : max(ends)])
        content.update(f"{file.metadata.num_rows} {names}".encode())
    return whole.hexdigest(), None if content is None else content.hexdigest()


def from_parquet(data: bytes, columns: Collection[str] | None = None) -> pa.Table:
    """Return the table, or those of `columns` that it has.

    Raises ValueError if the bytes are not a Parquet table of plain column types.
    """
    footer = data[max(0, len(data) - _PARQUET_END - int.from_bytes(data[-_PARQUET_END:-4], "little")) :]
    _require_plain(footer, _EXTENSION_IN_BASE64)  # opening the file would already read its types
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        return file.read(None if columns is None else [name for name in file.schema_arrow.names if name in columns])
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"it is not a Parquet file: {error!s:.200}") from None


def read_columns(read_range: Callable[[int, int], bytes], size: int, columns: Collection[str]) -> pa.Table:
    """Return those of `columns` that a Parquet file has, without reading the bytes of other columns.

    Raises ValueError like `from_parquet`, and what `read_range` raises.

    Args:
        read_range: returns the bytes from a start offset up to an end offset.
        size: size of the file in bytes.
        columns: names of the wanted columns.
    """
    if size <= _MIN_READ_BYTES:
        return from_parquet(read_range(0, size), columns)
    tail = read_range(size - _PARQUET_END, size)
    footer = read_range(max(0, size - _PARQUET_END - int.from_bytes(tail[:4], "little")), size)
    _require_plain(footer, _EXTENSION_IN_BASE64)
    try:
        with io.BufferedReader(_Ranges(read_range, size), _MIN_READ_BYTES) as ranges:
            file = pq.ParquetFile(pa.PythonFile(ranges, "r"))
            return file.read([name for name in file.schema_arrow.names if name in columns])
    except pa.ArrowException as error:
        raise ValueError(f"it is not a Parquet file: {error!s:.200}") from None


class _Ranges(io.RawIOBase):
    """A file-like object that reads only the requested ranges."""

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


def to_ipc(table: pa.Table) -> tuple[str, bytes]:
    """Return a table as a compressed Arrow IPC file: its SHA-256 and its bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table.combine_chunks())
    data = sink.getvalue().to_pybytes()
    return hashlib.sha256(data).hexdigest(), data


def from_ipc(data: bytes) -> pa.Table:
    """Return the table of an Arrow IPC file. Raises ValueError like `from_parquet`."""
    footer = data[max(0, len(data) - _IPC_END - int.from_bytes(data[-_IPC_END:-6], "little")) :]
    _require_plain(footer, [_EXTENSION])
    try:
        return pa.ipc.open_file(data).read_all()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"it is not an Arrow IPC file: {error!s:.200}") from None


def _require_plain(footer: bytes, marks: Iterable[bytes]) -> None:
    """Raise ValueError if the schema has column types that a library registered.

    An imported library may read its own column types by unpickling, which is unsafe.
    """
    if any(mark in footer for mark in marks):
        raise ValueError("it has columns of a library's extension type, which Cairn never reads")


PARTS = "write_ahead"
"""Folder of finished samples within an attempt's folder (`cairn.storage.logs.sample_log`)."""


class AttemptFolder:
    """Fresh folder for the files of one attempt at something that is committed."""

    def __init__(self, store: Store, attempts: str, name: str, *, root: str, shard: str | None = None):
        self.store = store
        self.attempts = attempts
        """Store path of the folder of all attempts, including those of the step's shards."""
        self.name = name
        self.shard = shard
        self.folder = f"{attempts}/{layout.check_name(name, 'attempt')}"
        """Store path of this attempt's folder, for engines that write files themselves."""
        self.superseded: list[str] = []
        """Store paths of write-ahead parts that are useless once this attempt is committed."""
        self._root = root

    def path(self, name: str) -> str:
        """Return the store path of a file of this attempt."""
        return f"{self.folder}/{check_path(name)}"

    def write_table(self, name: str, table: pa.Table) -> OutputFile:
        """Write a table as Parquet."""
        data = to_parquet(table)
        self.store.write(self.path(name), data)
        sha256, content = table_digests(data)
        return OutputFile(
            path=self._within_root(name), bytes=len(data), rows=table.num_rows, sha256=sha256, content=content
        )

    def adopt(self, file: StoredFile) -> OutputFile:
        """Describe a file that another writer, such as an engine, wrote into the folder.

        Makes no request: the store confirmed the file to its writer. A checkpoint may have thousands.
        """
        name = file.path.removeprefix(f"{self.folder}/")
        return OutputFile(path=self._within_root(name), bytes=file.bytes, sha256=file.sha256)

    def discard(self) -> None:
        """Delete the files of an attempt that will not be committed; they may fill the disk.

        Store errors are ignored. Finished samples stay, so that the next attempt can recover them.
        """
        parts = f"{self.path(PARTS)}/"
        with suppress(StoreError):
            for path in self.store.find(self.folder):
                if not path.startswith(parts):
                    self.store.delete(path)
            for write in self.store.unfinished(self.folder):
                if not write.path.startswith(parts):
                    self.store.discard(write)
            self.store.remove_empty_folders(self.folder)

    @contextmanager
    def discarded_on_failure(self) -> Iterator[None]:
        """Discard the attempt if the block fails. A store that did not respond is not called again."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, StoreError) or isinstance(error, StoreRefused):
                self.discard()
            raise

    def _within_root(self, name: str) -> str:
        return self.path(name).removeprefix(f"{self._root}/")


class Attempt(AttemptFolder):
    """Folder of one attempt at a step of a run."""

    def __init__(self, store: Store, run: str, iteration: int, step: str, shard: str | None, name: str):
        super().__init__(store, layout.attempts(run, iteration, step), name, root=layout.run(run), shard=shard)
        self.run = run
        self.iteration = iteration
        self.step = step


def discard_superseded(attempts: Iterable[AttemptFolder]) -> None:
    """Delete the write-ahead parts that the commits of attempts in one store made useless, in the background.

    Store errors are ignored: a collector removes what is left.
    """
    folders = [one for one in attempts if one.superseded]
    paths = [path for one in folders for path in one.superseded]
    for one in folders:
        one.superseded = []
    if paths:
        deletion = folders[0].store.delete_many
        threading.Thread(target=_quietly, args=(deletion, paths), name="discard-parts", daemon=True).start()


def _quietly(delete: Callable[[Sequence[str]], None], paths: Sequence[str]) -> None:
    with suppress(StoreError):
        delete(paths)


def read_bytes(store: Store, run: str, output: OutputFile) -> bytes:
    """Return the content of a committed file.

    Raises Damaged, naming the file, if it is missing or differs from what was committed, and Retired.
    """
    path = layout.in_run(run, output.path)
    try:
        data = store.read(path)
    except FileNotFoundError:
        if is_retired(store, run, path):
            raise Retired(f"{path} is retired: run {run!r} deletes its older files") from None
        raise Damaged(f"{path} is committed but missing; expected {output.bytes} bytes") from None
    sha256 = hashlib.sha256(data).hexdigest()
    if not is_redacted(store, run, output, len(data), sha256):
        check_bytes(path, output, len(data), sha256)
    return data


def is_redacted(store: Store, run: str, output: OutputFile, size: int, sha256: str) -> bool:
    """Return whether a file differs from what was committed because it was redacted, and is as the redaction recorded
    it.

    Reads the decisions only if the file differs.
    """
    if (size, sha256) == (output.bytes, output.sha256):
        return False
    versions = redacted_files(Decisions(store, read_manifest(store, run)).all()).get(output.path, ())
    return any((size, sha256) == (file.new_bytes, file.new_sha256) for _, file in versions)


def is_retired(store: Store, run: str, path: str) -> bool:
    """Return whether retention has removed, or is about to remove, the file at a store path. Makes one request."""
    place = layout.parse_file(run, path)
    return place is not None and store.exists(layout.retired(run, place[0], layout.Kind.of(place[1])))


def check_bytes(path: str, output: OutputFile, size: int, sha256: str) -> None:
    """Raise Damaged unless the size and digest of a file are those that were committed."""
    if (size, sha256) != (output.bytes, output.sha256):
        raise Damaged(
            f"{path} is not what was committed: expected {output.bytes} bytes with sha256 {output.sha256}, "
            f"found {size} bytes with sha256 {sha256}"
        )


class CheckedTable:
    """The bytes of a committed table, which are read and checked once. Columns are decoded when they are needed."""

    def __init__(self, store: Store, run: str, output: OutputFile) -> None:
        """Read the file. Raises Damaged, naming the file, if it is missing or differs from what was committed, and
        Retired."""
        self._path = layout.in_run(run, output.path)
        self._data = read_bytes(store, run, output)
        place = layout.parse_file(run, self._path)
        self._schema = None if place is None else SCHEMAS.get(place[1])

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return len(self._data)

    def read(self, columns: Collection[str] | None = None) -> pa.Table:
        """Return the table, or those of some columns that it has. Columns that the step's schema got later are null."""
        table = self.recorded(columns)
        if self._schema is not None:
            table = complete(table, self._schema)
        return table if columns is None else table.select([name for name in table.column_names if name in columns])

    def recorded(self, columns: Collection[str] | None = None) -> pa.Table:
        """Return the table with the columns with which it was written, or those of `columns` that it has."""
        try:
            return from_parquet(self._data, columns)
        except ValueError as error:
            raise Damaged(f"{self._path} is not in Cairn's format: {error}") from error


def read_table(store: Store, run: str, output: OutputFile, columns: Sequence[str] | None = None) -> pa.Table:
    """Return a committed table, or some of its columns, as `CheckedTable.read` does. Raises as it does; the whole file
    is checked whatever columns are wanted."""
    table = CheckedTable(store, run, output).read(columns)
    return table if columns is None else table.select(list(columns))


def read_recorded_table(store: Store, run: str, output: OutputFile, columns: Sequence[str] | None = None) -> pa.Table:
    """Return a committed table with the columns with which it was written, or those of `columns` that it has.

    Raises like `read_table`.
    """
    return CheckedTable(store, run, output).recorded(columns)


def sample_rows(table: pa.Table, groups: Collection[int] | None = None) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the rows of a table of samples by (group, sample); with `groups`, those of these groups."""
    few = table if groups is None else table.filter(pc.is_in(table["group_id"], pa.array(sorted(groups), pa.int64())))
    return {(row["group_id"], row["sample_index"]): row for row in few.to_pylist()}
