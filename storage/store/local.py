"""A store on local files.

Bytes go to a hidden temporary file in the target's folder and are synced. The file gets its name by a rename (replace)
or a hard link (exclusive create). Then the folder is synced. A crash can leave only hidden temporary files, which
`list` and `find` do not show.
"""

import builtins
import errno
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from cairn.storage.store.errors import (
    NO_SPACE,
    Damaged,
    LinkOutsideStore,
    NoSpace,
    StoreError,
    StoreRefused,
    naming_full,
)
from cairn.storage.store.store import LONGEST_RECORD, Unfinished, check_path, is_path

_REFUSALS = {
    errno.ENOSPC: "no space is left on the device; free some",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EROFS: "the file system is read-only; choose another store",
    errno.EACCES: "permission is denied; check the folder's owner and mode",
    errno.EPERM: "the operation is not permitted there; check the folder's owner, mode and file system",
    errno.ENOTDIR: "a part of the path is a file, not a folder; choose another store",
    errno.EISDIR: "a folder is in the way of a file; choose another store",
    errno.EEXIST: "a file is in the way of a folder; choose another store",
    errno.ENAMETOOLONG: "the name is too long for the file system; choose shorter names",
    errno.ENOTSUP: "the file system has no hard links, which exclusive creation needs; choose another store",
}

_SYNCS_AT_A_TIME = 8
_FOLDERS_REMEMBERED = 4096


@contextmanager
def _named_errors(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _REFUSALS:
            raise (NoSpace if error.errno in NO_SPACE else StoreRefused)(
                f"cannot {action} {path}: {_REFUSALS[error.errno]}"
            ) from error
        raise StoreError(f"cannot {action} {path}: {error.strerror}") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise FileNotFoundError for anything that is not a file, as on an object store."""
    absent: OSError | None = None
    with _named_errors("read", path):
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            absent = error
    if absent is not None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from absent


@contextmanager
def _opened(path: str | Path, flags: int = 0) -> Iterator[BinaryIO]:
    """Yield a regular file opened for reading. Anything else, such as a pipe, counts as absent.

    Raises Damaged for a `.json` file of more than `LONGEST_RECORD` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if found.st_size > LONGEST_RECORD and str(path).endswith(".json"):
            raise Damaged(f"{path} has {found.st_size} bytes, but a ledger record has at most {LONGEST_RECORD}")
        yield file


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _copy_synced(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with open(target, "rb+") as file:
        os.fsync(file.fileno())


class LocalStore:
    """A `cairn.storage.store.store.Store` on local files."""

    def __init__(self, url: str):
        self.root = Path(url).expanduser().resolve()
        self.url = str(self.root)
        self.retries = 0
        self._durable: set[Path] = set()
        """Folders below the root whose own names are durable."""
        self._folders: set[str] = set()
        """Folders below the root that are not links."""
        self._syncing = ThreadPoolExecutor(_SYNCS_AT_A_TIME, thread_name_prefix="sync-folder")

    def __reduce__(self) -> tuple[type["LocalStore"], tuple[str]]:
        return LocalStore, (self.url,)

    def _path(self, path: str) -> Path:
        target = self.root / check_path(path)
        if self._has_link(path) and not target.resolve().is_relative_to(self.root):
            raise LinkOutsideStore(f"{target} leads out of the store by a symbolic link; remove the link")
        return target

    def _has_link(self, path: str) -> bool:
        """Return whether a part of the path is a symbolic link. Folders that are not links are remembered.

        Resolving the path instead would check every folder from `/` on, which takes most of the time of a small read.
        """
        part = self.url
        for name in path.split("/"):
            part = f"{part}/{name}"
            if part in self._folders:
                continue
            try:
                mode = os.lstat(part).st_mode
            except OSError:  # it does not exist, and nothing below it
                return False
            if stat.S_ISLNK(mode):
                return True
            if stat.S_ISDIR(mode):
                if len(self._folders) > _FOLDERS_REMEMBERED:
                    self._folders.clear()
                self._folders.add(part)
        return False

    @contextmanager
    def _replacing(self, target: Path) -> Iterator[Path]:
        """Yield a hidden path next to the target, for bytes that get the target's name inside the block.

        After the block the name is durable, and so are the names of all folders above it.
        """
        fresh = self._make_folder(target.parent)
        temporary = target.parent / f".{uuid.uuid4().hex}.tmp"
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
        folders = {target.parent, *(folder.parent for folder in fresh)}
        if len(folders) == 1:
            _sync_folder(target.parent)
        else:  # a disk flushes several folders that are synced at once in about the time of one
            list(self._syncing.map(_sync_folder, folders))
        if len(self._durable) > _FOLDERS_REMEMBERED:
            self._durable.clear()
        self._durable.update(fresh)

    def _make_folder(self, folder: Path) -> list[Path]:
        """Create a folder like `mkdir -p`. Return the folders whose names may not be durable yet.

        These are new folders, and folders below the root that another process may have created a moment ago.
        """
        new = [] if self.root.is_dir() else [above for above in (self.root, *self.root.parents) if not above.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        below = [above for above in (folder, *folder.parents) if self.root in above.parents]
        return [*new, *(above for above in below if above not in self._durable)]

    def check(self) -> None:
        with _named_errors("use", self.root), suppress(FileNotFoundError):  # made when something is written
            os.scandir(self.root).close()

    def read(self, path: str) -> bytes:
        target = self._path(path)
        with _reading(target), _opened(target) as file:
            return file.read()

    def read_many(self, paths: Sequence[str]) -> builtins.list[bytes | None]:
        inside: dict[str, str] = {"": str(self.root)}
        """Real paths of folders, by their store paths. No link leads from them out of the store."""

        def folder_of(path: str) -> str:
            folder = path.rpartition("/")[0]
            if folder not in inside:
                full = f"{folder_of(folder)}/{folder.rpartition('/')[2]}"
                inside[folder] = str(self._path(folder)) if os.path.islink(full) else full
            return inside[folder]

        def read(path: str) -> bytes | None:
            try:
                with _opened(f"{folder_of(path)}/{path.rpartition('/')[2]}", os.O_NOFOLLOW) as file:
                    return file.read()
            except FileNotFoundError:
                return None
            except OSError:
                with suppress(FileNotFoundError):
                    return self.read(path)  # follows a link that stays, and names what is wrong
                return None

        return [read(check_path(path)) for path in paths]

    def read_range(self, path: str, start: int, end: int) -> bytes:
        target = self._path(path)
        with _reading(target), open(target, "rb") as file:
            file.seek(start)
            return file.read(end - start)

    def write(self, path: str, data: bytes) -> None:
        target = self._path(path)
        with _named_errors("write", target), self._replacing(target) as temporary:
            _write_synced(temporary, data)
            os.replace(temporary, target)

    def create(self, path: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
        target = self._path(path)
        if not data:
            raise ValueError(f"cannot create {path} without content")
        with _named_errors("create", target), self._replacing(target) as temporary:
            _write_synced(temporary, data)
            guard()
            try:
                os.link(temporary, target)
                return True
            except FileExistsError:
                # On a network file system the link may exist although its response was lost, so count the links.
                return temporary.stat().st_nlink == 2

    def exists(self, path: str) -> bool:
        return self._path(path).is_file()

    def page(self, folder: str, after: str) -> tuple[list[str], bool]:
        return [name for name in self.list(folder) if name > after], False

    def find(self, folder: str) -> dict[str, int]:
        sizes = {}
        for name in self.list(folder):
            child = f"{folder}/{name.removesuffix('/')}"
            if name.endswith("/"):
                sizes.update(self.find(child))
            else:
                with suppress(FileNotFoundError):  # deleted since it was listed
                    sizes[child] = self._path(child).stat().st_size
        return dict(sorted(sizes.items()))

    def delete(self, path: str) -> None:
        target = self._path(path)
        with _named_errors("delete", target), suppress(FileNotFoundError, NotADirectoryError):
            target.unlink()

    def delete_many(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.delete(path)

    def unfinished(self, folder: str) -> list[Unfinished]:
        found = []
        for parent, _, names in os.walk(self._path(folder)):
            for path in (Path(parent, name) for name in names if _is_temporary(name)):
                with suppress(FileNotFoundError):  # finished since it was listed
                    status = path.stat()
                    found.append(Unfinished(path.relative_to(self.root).as_posix(), status.st_size, status.st_mtime))
        return sorted(found, key=lambda write: write.path)

    def list(self, folder: str) -> list[str]:
        target = self._path(folder)
        with _named_errors("list", target):
            try:
                with os.scandir(target) as entries:
                    names = [entry.name + ("/" if entry.is_dir() else "") for entry in entries]
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(name for name in names if is_path(name.removesuffix("/")) and not _is_temporary(name))

    def discard(self, unfinished: Unfinished) -> None:
        self.delete(unfinished.path)

    def remove_empty_folders(self, folder: str) -> None:
        self._durable.clear()
        self._folders.clear()
        for path, _, _ in os.walk(self._path(folder), topdown=False):
            with suppress(OSError):  # it is not empty
                os.rmdir(path)

    def sha256(self, path: str) -> tuple[int, str]:
        target = self._path(path)
        with _reading(target), open(target, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return file.tell(), digest

    def put_file(self, local: Path, path: str) -> None:
        target = self._path(path)
        with _named_errors("write", target), self._replacing(target) as temporary:
            _copy_synced(local, temporary)
            os.replace(temporary, target)

    def get_file(self, path: str, local: Path) -> None:
        source = self._path(path)
        temporary = local.parent / f".{uuid.uuid4().hex}.tmp"
        with _reading(source), naming_full(local.parent):
            try:
                shutil.copyfile(source, temporary)
                os.replace(temporary, local)
            finally:
                temporary.unlink(missing_ok=True)
