"""Disks of a few megabytes, for tests that fill them.

    with small_disk(folder, 64 << 20):
        ballast = fill(folder)          # no byte is left
        ballast.unlink()

    subprocess.run([*on_small_disks({Path("/dev/shm"): 64 << 20}), "python", …])    # only that process sees these

Needs root.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


def why_not() -> str | None:
    """Why there can be no such disks; None where there can."""
    may_mount = os.geteuid() == 0 and not subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode
    return None if may_mount else "mounting a disk of its own needs root, and a container the right to mount"


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A disk of so many bytes in an empty folder, which is made if it is not there."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, leaving: int = 0) -> Path:
    """The file that takes all but so many bytes of a disk."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(ballast, max(0, ballast.stat().st_size - leaving))
    return ballast


def on_small_disks(sizes: Mapping[Path, int]) -> list[str]:
    """What a command begins with that is to have disks of such sizes in these folders, alone in seeing them."""
    mounts = [f"mount -t tmpfs -o size={size} none {folder}" for folder, size in sizes.items()]
    return ["unshare", "--mount", "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh"]
