"""Bytes under a root, on local files or on an object store: no JSON, no knowledge of runs.

Everything durable rests on two promises that both kinds of store keep: a file appears with all of its bytes or not at
all, and of several creators of one path exactly one wins.
"""

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cairn.storage.store.errors import StoreRefused

# What a path inside a store may look like.


_NAME = r"(?!\.{1,2}(?:/|\Z))[^/\\\x00-\x1f]+"
_PATH = re.compile(f"{_NAME}(?:/{_NAME})*")


def is_path(path: str) -> bool:
    """Whether a path stays below its root: names between single slashes, none of them empty, "." or "..", no backslash
    or control character."""
    return _PATH.fullmatch(path) is not None


def check_path(path: str) -> str:
    """Return a path that stays below its root, or raise ValueError."""
    if not is_path(path):
        raise ValueError(f"{path!r} is not a path inside a store: names between single slashes, without '.' and '..'")
    return path


@dataclass(frozen=True)
class Unfinished:
    """What an interrupted write left behind, which only `unfinished` shows."""

    path: str
    """Of the hidden file, or of the file that an upload was to become."""
    bytes: int | None
    """None where the store does not say."""
    touched_at: float
    """Unix seconds: when something of it was last written, or the upload began."""
    upload: str | None = None
    """The upload's id on an object store."""


@dataclass(frozen=True)
class StoredFile:
    """A file that was written, as its writer knows it."""

    path: str
    bytes: int
    sha256: str
    """Of the bytes that were handed to the store."""


LONGEST_RECORD = 64 * 2**20
"""Bytes of a `.json` file, which is a record of the ledger: markers of an object store hold 5 MiB at most."""


class Store(Protocol):
    """Paths are relative to the root, with "/" between names (see `cairn.storage.store.store`).

    Any method raises StoreRefused (credentials, missing bucket, permissions: a new try will not help), its kind NoSpace
    (a new try helps when somebody has freed some) or StoreError (no right answer after bounded retries). A store may be
    pickled; the copy opens connections of its own. Calls are safe from several threads.

    What costs what: on an object store `read`, `read_range`, `exists`, `create`, `delete` and a small `write` are one
    request each, `list` and `find` one request a thousand entries, and `put_file` one request a part. Nothing is
    cached: a call sees what other processes did before it.

    `list`, `page` and `find` leave out what has no usable path, such as the markers that file browsers make of folders.
    """

    url: str
    """The root: an absolute folder, or `s3://bucket/prefix`."""

    @property
    def retries(self) -> int:
        """Requests and operations that this object had to try again so far."""

    def check(self) -> None:
        """Ask the store to answer at all; writes nothing. Raises StoreRefused, soon, where credentials, bucket, folder
        or endpoint are wrong: other calls treat an endpoint out of reach as an outage and wait for it."""

    def read(self, path: str) -> bytes:
        """All bytes of a file. Raises FileNotFoundError, and Damaged for a `.json` file of more than `LONGEST_RECORD`
        bytes."""

    def read_many(self, paths: Sequence[str]) -> list[bytes | None]:
        """All bytes of many small files, in the order of their paths; None where there is none. A request each, some at
        a time."""

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """The bytes of a file from `start` up to `end`, which must lie within it. Raises FileNotFoundError."""

    def write(self, path: str, data: bytes) -> None:
        """Write or replace a file. Atomic: a reader sees the old bytes or the new. Durable when it returns. Of several
        writers the last wins; nothing says which was last."""

    def create(self, path: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
        """Write a file unless one is there; True if this call created it. Atomic, durable, and exclusive: of all who
        create a path exactly one wins.

        On an object store the reply may be lost after the object was made. Then, as after any refusal, the object is
        read again and this call has won if it holds exactly `data`. So data must be unlike anyone else's (a random id
        or a digest in it makes sure), small (one PUT carries it) and not empty.

        `guard` is called right before each try; what it raises ends the creation and is raised.
        """

    def exists(self, path: str) -> bool:
        """Whether there is a file (not a folder) at the path."""

    def page(self, folder: str, after: str) -> tuple[list[str], bool]:
        """The first of the names that `list` gives after the one given, and whether there are more. One request."""

    def find(self, folder: str) -> dict[str, int]:
        """Path and size in bytes of every file at any depth below a folder, sorted by path."""

    def delete(self, path: str) -> None:
        """Remove a file if it is there."""

    def unfinished(self, folder: str) -> list[Unfinished]:
        """What writes that were interrupted, or still go on, left at any depth below a folder."""

    def list(self, folder: str) -> list[str]:
        """Names of a folder's direct children, sorted; folders end in "/". An absent folder has none."""

    def discard(self, unfinished: Unfinished) -> None:
        """Remove it if it is there. A write that still goes on fails."""

    def remove_empty_folders(self, folder: str) -> None:
        """Remove a folder and those below it, as far as they hold no file; object stores have no folders."""

    def sha256(self, path: str) -> tuple[int, str]:
        """Size in bytes and hexadecimal SHA-256 of a file, streamed. Raises FileNotFoundError."""

    def put_file(self, local: Path, path: str) -> None:
        """Copy a local file of any size into the store, streamed. Atomic and durable, like `write`."""

    def get_file(self, path: str, local: Path) -> None:
        """Copy a file of any size out of the store, streamed. `local` appears complete or not at all. Raises
        FileNotFoundError."""


def probe(store: Store) -> None:
    """Make sure that the store can carry a run: it answers, holds what is written, and refuses a second exclusive
    create. Leaves nothing behind. Raises StoreRefused."""
    store.check()
    path = f"probe-{uuid.uuid4().hex}"
    first, second = f"first {path}".encode(), f"second {path}".encode()
    try:
        if not store.create(path, first) or store.read(path) != first:
            raise StoreRefused(f"store {store.url} does not give back what was written; use another store")
        if store.create(path, second) or store.read(path) != first:
            raise StoreRefused(
                f"store {store.url} lets a second writer create a file that exists, so two drivers could overwrite "
                "each other; use one that honours If-None-Match (AWS S3, Ceph, SeaweedFS 4.29 or later) or local files"
            )
    finally:
        store.delete(path)
