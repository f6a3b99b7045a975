"""A disk that loses what was not flushed when the power goes: a file system in user space, over FUSE.

What is written is in memory until it is flushed: a file's bytes by fsync of the file, a name by fsync of its folder.
When the power goes, each name and each file that was not flushed is as it was before, or, by chance, as it had become:
a kernel may have written back anything at any time. A file whose name survived without its bytes is empty or cut off.

    with volatile_disk(folder) as disk:           # mounted at disk.path
        disk.power_fails_at(137)                  # the 137th flush, link or rename from now on is not done any more
        ...                                       # OSError (ENOTCONN) for whoever uses it from then on
        disk.power_on()                           # what survived is there again

Needs root, /dev/fuse and libfuse, which is downloaded with apt and unpacked beside the build if it is not installed.
"""

import argparse
import errno
import os
import pickle
import random
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes.util import find_library
from pathlib import Path
from typing import Any

from tests.debian import unpacked
from tests.waiting import wait_for

ROOT = Path(__file__).parents[1]
LIBRARY = "FUSE_LIBRARY_PATH"
"""Environment variable by which mfusepy finds libfuse."""


def why_not() -> str | None:
    """Why there can be no such disk here; None where there can."""
    if os.geteuid() != 0:
        return "mounting a FUSE file system needs root"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse: load the kernel's fuse module"
    return None


class File:
    """A file's bytes, as written and as flushed."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.flushed: bytes | None = None
        self.links = 1
        self.mode = stat.S_IFREG | 0o644


class Folder:
    """A folder's names, as made and as flushed."""

    def __init__(self) -> None:
        self.entries: dict[str, File | Folder] = {}
        self.flushed: dict[str, File | Folder] = {}
        self.mode = stat.S_IFDIR | 0o755


def surviving(folder: Folder, chance: random.Random, share: float) -> Folder:
    """What is left of a folder without power: of what was not flushed, each piece with probability `share`."""
    files: dict[int, File] = {}

    def of_file(file: File) -> File:
        if id(file) not in files:
            left = files[id(file)] = File()
            left.links, left.mode = 0, file.mode
            written = bytes(file.data)
            if file.flushed == written or chance.random() < share:
                survived = written
            elif file.flushed is not None:
                survived = file.flushed
            else:
                survived = written[: chance.randrange(len(written))] if share and written else b""
            left.data, left.flushed = bytearray(survived), survived
        files[id(file)].links += 1
        return files[id(file)]

    def of_folder(one: Folder) -> Folder:
        left = Folder()
        for name in sorted(one.entries.keys() | one.flushed.keys()):
            made, flushed = one.entries.get(name), one.flushed.get(name)
            survived = made if made is flushed or chance.random() < share else flushed
            if survived is not None:
                left.entries[name] = of_folder(survived) if isinstance(survived, Folder) else of_file(survived)
        left.flushed = dict(left.entries)
        return left

    return of_folder(folder)


def serve(mount: Path, image: Path, fails_at: Path, seed: int, share: float) -> None:
    """Serve the disk of an image until the power fails, then write what survived as the image, and end."""
    import mfusepy  # only where libfuse is

    root: Folder = pickle.loads(image.read_bytes()) if image.exists() else Folder()
    times: dict[int, int] = {}
    moments = 0

    def lookup(path: str) -> File | Folder:
        node: File | Folder = root
        for name in path.strip("/").split("/") if path != "/" else []:
            if not isinstance(node, Folder) or name not in node.entries:
                raise mfusepy.FuseOSError(errno.ENOENT)
            node = node.entries[name]
        return node

    def folder_of(path: str) -> tuple[Folder, str]:
        above, _, name = path.rpartition("/")
        folder = lookup(above or "/")
        assert isinstance(folder, Folder)
        return folder, name

    def file_at(path: str) -> File:
        node = lookup(path)
        if isinstance(node, Folder):
            raise mfusepy.FuseOSError(errno.EISDIR)
        return node

    def moment() -> None:
        """Something becomes durable, or gets its name, unless the power fails right before."""
        nonlocal moments
        moments += 1
        fails_at.with_suffix(".count").write_text(str(moments))
        if fails_at.exists() and moments >= int(fails_at.read_text()):
            image.write_bytes(pickle.dumps(surviving(root, random.Random(seed), share)))
            fails_at.unlink()
            os._exit(0)

    class Disk(mfusepy.Operations):
        use_ns = True

        def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
            node = handles[fh] if fh in handles else lookup(path)
            size, links = (0, 2) if isinstance(node, Folder) else (len(node.data), node.links)
            now = times.setdefault(id(node), time.time_ns())
            clock = {"st_atime": now, "st_mtime": now, "st_ctime": now}
            return {"st_mode": node.mode, "st_nlink": links, "st_size": size, **clock}

        def readdir(self, path: str, fh: int) -> Any:
            folder = lookup(path)
            assert isinstance(folder, Folder)
            return [".", "..", *folder.entries]

        def mkdir(self, path: str, mode: int) -> int:
            folder, name = folder_of(path)
            if name in folder.entries:
                raise mfusepy.FuseOSError(errno.EEXIST)
            folder.entries[name] = Folder()
            return 0

        def rmdir(self, path: str) -> int:
            folder, name = folder_of(path)
            if folder.entries[name].entries:  # type: ignore[union-attr]
                raise mfusepy.FuseOSError(errno.ENOTEMPTY)
            del folder.entries[name]
            return 0

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            folder, name = folder_of(path)
            folder.entries[name] = File()
            return self.open(path, 0)

        def open(self, path: str, flags: int) -> int:
            handles[len(handles) + 1] = file_at(path)
            return len(handles)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return bytes(handles[fh].data[offset : offset + size])

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            file = handles[fh]
            file.data[offset:offset] = bytes(max(0, offset - len(file.data)))
            file.data[offset : offset + len(data)] = data
            times.pop(id(file), None)
            return len(data)

        def truncate(self, path: str, length: int, fh: Any = None) -> int:
            file = handles[fh] if fh in handles else file_at(path)
            del file.data[length:]
            file.data += bytes(length - len(file.data))
            return 0

        def link(self, target: str, source: str) -> int:
            moment()
            folder, name = folder_of(target)
            if name in folder.entries:
                raise mfusepy.FuseOSError(errno.EEXIST)
            folder.entries[name] = file = file_at(source)
            file.links += 1
            return 0

        def rename(self, old: str, new: str) -> int:
            moment()
            (before, name), (after, other) = folder_of(old), folder_of(new)
            replaced = after.entries.get(other)
            if isinstance(replaced, File):
                replaced.links -= 1
            after.entries[other] = before.entries.pop(name)
            return 0

        def unlink(self, path: str) -> int:
            folder, name = folder_of(path)
            file_at(path).links -= 1
            del folder.entries[name]
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            moment()
            handles[fh].flushed = bytes(handles[fh].data)
            return 0

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            moment()
            folder = lookup(path)
            assert isinstance(folder, Folder)
            folder.flushed = dict(folder.entries)
            return 0

        def chmod(self, path: str, mode: int) -> int:
            return 0

        def utimens(self, path: str, times: Any = None) -> int:
            return 0

    handles: dict[int, File] = {}
    timeouts = {f"{kind}_timeout": 0 for kind in ("entry", "attr", "negative")}
    mfusepy.FUSE(Disk(), str(mount), foreground=True, nothreads=True, **timeouts)


class VolatileDisk:
    """Such a disk, mounted at `path`, served by a process of its own."""

    def __init__(self, folder: Path, library: str) -> None:
        self.path = folder / "disk"
        self.path.mkdir()
        self._image, self._fails_at = folder / "image", folder / "fails-at"
        self._environment = {**os.environ, LIBRARY: library, "PYTHONPATH": str(ROOT)}
        self._process: subprocess.Popen[bytes] | None = None

    def power_on(self, *, seed: int = 0, share: float = 0.0) -> None:
        """Mount what survived. When the power fails the next time, `share` of what was not flushed then survives, by
        dice of that seed."""
        self.unmount()
        self._fails_at.unlink(missing_ok=True)
        self._fails_at.with_suffix(".count").write_text("0")
        words = [self.path, self._image, self._fails_at, seed, share]
        command = [sys.executable, "-m", "tests.volatile_disk", *map(str, words)]
        self._process = subprocess.Popen(command, env=self._environment, cwd=ROOT)
        wait_for(self.path.is_mount, 60)

    def power_fails_at(self, moment: int) -> None:
        """Fail before so many flushes, links and renames since the power came are done."""
        self._fails_at.write_text(str(moment))

    def power_fails(self) -> None:
        """Fail now, unless that has happened."""
        self.power_fails_at(0)
        with suppress(OSError), (self.path / "last-light").open("wb") as file:
            os.fsync(file.fileno())
        assert self._process is not None
        self._process.wait(60)

    @property
    def moments(self) -> int:
        """Flushes, links and renames since the power came."""
        return int(self._fails_at.with_suffix(".count").read_text())

    @property
    def has_power(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def unmount(self) -> None:
        """Let go of it: what it held is lost but for the image."""
        subprocess.run(["umount", "-l", self.path], capture_output=True, timeout=60)
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None


@contextmanager
def volatile_disk(folder: Path) -> Iterator[VolatileDisk]:
    """A disk in a folder, without power at first."""
    library = find_library("fuse3")
    if library is None:
        root = unpacked(["libfuse3-3"], ROOT / "build" / "fuse")
        library = str(next(root.rglob("libfuse3.so.3")))
    disk = VolatileDisk(folder, library)
    try:
        yield disk
    finally:
        disk.unmount()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in {"mount": Path, "image": Path, "fails_at": Path, "seed": int, "share": float}.items():
        parser.add_argument(name, type=kind)
    arguments = parser.parse_args()
    serve(arguments.mount, arguments.image, arguments.fails_at, arguments.seed, arguments.share)
