"""The files of a step's attempt. They exist for nobody until a commit names them with their digests."""

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pyarrow as pa

from cairn.storage import layout, tables
from cairn.storage.commits import OutputFile
from cairn.storage.decisions import Decisions, redacted_files
from cairn.storage.errors import Damaged, Retired, StoreError
from cairn.storage.manifest import read_manifest
from cairn.storage.paths import check_path
from cairn.storage.schemas import SCHEMAS, complete
from cairn.storage.store import Store, StoredFile

PARTS = "write_ahead"
"""Folder within an attempt's, of groups that are finished: see `cairn.storage.write_ahead`."""


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
            digesting = beside.submit(tables.content_digest, table)
            data = tables.to_parquet(table)
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
        return tables.from_parquet(data, columns)
    except ValueError as error:
        raise Damaged(f"{layout.in_run(run, output.path)} is not what Cairn writes: {error}") from error
