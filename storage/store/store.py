"""The interface of stores: bytes under a root, on local files or on an object store, without knowledge of runs.

All durability depends on two promises that both kinds of store keep. A file appears with all of its bytes or not at
all. Of several creators of one path exactly one wins.
"""

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cairn.storage.store.errors import StoreRefused

# Valid paths inside a store.


_NAME = r"(?!\.{1,2}(?:/|\Z))[^/\\\x00-\x1f]+"
_PATH = re.compile(f"{_NAME}(?:/{_NAME})*")


def is_path(path: str) -> bool:
    """Return whether a path stays below its root.

    Single slashes separate its names. No name is empty, "." or "..", or contains a backslash or control character.
    """
    return _PATH.fullmatch(path) is not None


def check_path(path: str) -> str:
    """Return the path if it stays below its root; raise ValueError otherwise."""
    if not is_path(path):
        raise ValueError(f"{path!r} is not a path inside a store: names between single slashes, without '.' and '..'")
    return path


@dataclass(frozen=True)
class Unfinished:
    """Remains of an interrupted write, which only `unfinished` shows."""

    path: str
    """Path of the hidden file, or of the file that the upload was to create."""
    bytes: int | None
    """Size; None if the store does not report it."""
    touched_at: float
    """Time of the last write, or of the start of the upload, in Unix seconds."""
    upload: str | None = None
    """The upload's id on an object store."""


@dataclass(frozen=True)
class StoredFile:
    """A written file, as its writer describes it."""

    path: str
    bytes: int
    sha256: str
    """SHA-256 of the bytes that the writer passed to the store."""


REQUESTS = 8
"""Requests that a caller sends in parallel: an object store takes tens of milliseconds for each."""

LONGEST_RECORD = 64 * 2**20
"""Greatest number of bytes of a `.json` file, which is a record of the ledger. On an object store markers have at most
5 MiB."""


class Store(Protocol):
    """Interface of a store. Paths are relative to the root, with "/" between names.

    Any method raises StoreRefused (credentials, missing bucket, permissions: a retry will not help), its subclass
    NoSpace (a retry helps once a person has freed some space) or StoreError (no correct response after bounded
    retries). A store can be pickled; the copy opens its own connections. Calls are safe from several threads.

    Costs: on an object store `read`, `read_range`, `exists`, `create`, `delete` and a small `write` make one request
    each, `list` and `find` one request for every thousand entries, and `put_file` one for each part. Nothing is cached:
    a call sees what other processes did before it.

    `list`, `page` and `find` skip entries without a valid path, such as the markers that file browsers create for
    folders.
    """

    url: str
    """Root: an absolute folder, or `s3://bucket/prefix`."""

    @property
    def retries(self) -> int:
        """Number of requests and operations that this object has retried so far."""

    def check(self) -> None:
        """Check that the store responds, without writing.

        Raises StoreRefused quickly if credentials, bucket, folder or endpoint are wrong. Other calls treat an
        unreachable endpoint as an outage and wait for it.
        """

    def read(self, path: str) -> bytes:
        """Return all bytes of a file.

        Raises FileNotFoundError, and Damaged for a `.json` file of more than `LONGEST_RECORD` bytes.
        """

    def read_many(self, paths: Sequence[str]) -> list[bytes | None]:
        """Return all bytes of many small files, in the order of their paths; None for a missing file.

        Makes one request for each, several in parallel.
        """

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Return the bytes of a file from `start` up to `end`, which must be within it. Raises FileNotFoundError."""

    def write(self, path: str, data: bytes) -> None:
        """Write or replace a file. Durable when it returns.

        The write is atomic: a reader sees the old bytes or the new. Of several writers the last wins; nothing reports
        which was last.
        """

    def create(self, path: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
        """Create a file unless it exists. Return True if this call created it.

        The creation is atomic, durable and exclusive: of all creators of a path exactly one wins.

        On an object store the response may be lost after the object was created. Then, as after any refusal, the object
        is read again, and this call has won if the object holds exactly `data`. So `data` must be unique (a random id
        or a digest in it ensures that), small (it must fit into one PUT) and not empty.

        `guard` is called right before each try; what it raises ends the creation and propagates.
        """

    def exists(self, path: str) -> bool:
        """Return whether there is a file (not a folder) at the path."""

    def page(self, folder: str, after: str) -> tuple[list[str], bool]:
        """Return the first names of `list` after the name `after`, and whether there are more. Makes one request."""

    def find(self, folder: str) -> dict[str, int]:
        """Return path and size in bytes of every file at any depth below a folder, sorted by path."""

    def delete(self, path: str) -> None:
        """Delete a file if it exists."""

    def delete_many(self, paths: Sequence[str]) -> None:
        """Delete files as far as they exist. Makes one request for every thousand on an object store."""

    def unfinished(self, folder: str) -> list[Unfinished]:
        """Return the remains of writes at any depth below a folder that were interrupted or are still running."""

    def list(self, folder: str) -> list[str]:
        """Return the names of a folder's direct children, sorted; folders end in "/". An absent folder has none."""

    def discard(self, unfinished: Unfinished) -> None:
        """Delete the remains of a write if they exist. If the write is still running, it fails."""

    def remove_empty_folders(self, folder: str) -> None:
        """Delete a folder and those below it, as far as they contain no file. Object stores have no folders."""

    def sha256(self, path: str) -> tuple[int, str]:
        """Return the size in bytes and hexadecimal SHA-256 of a file, streamed. Raises FileNotFoundError."""

    def put_file(self, local: Path, path: str) -> None:
        """Copy a local file of any size into the store, streamed. Atomic and durable, like `write`."""

    def get_file(self, path: str, local: Path) -> None:
        """Copy a file of any size out of the store, streamed. Raises FileNotFoundError.

        `local` appears complete or not at all.
        """


def probe(store: Store) -> None:
    """Check that the store can hold runs: it responds, stores what is written, and rejects a second exclusive create.

    Leaves nothing behind. Raises StoreRefused.
    """
    store.check()
    path = f"probe-{uuid.uuid4().hex}"
    first, second = f"first {path}".encode(), f"second {path}".encode()
    try:
        if not store.create(path, first) or store.read(path) != first:
            raise StoreRefused(f"store {store.url} returns other bytes than were written; use another store")
        if store.create(path, second) or store.read(path) != first:
            raise StoreRefused(
                f"store {store.url} lets a second writer create a file that exists, so two drivers could overwrite "
                "each other; use one that honours If-None-Match (AWS S3, Ceph, SeaweedFS 4.29 or later) or local files"
            )
    finally:
        store.delete(path)
