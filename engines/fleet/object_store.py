"""Ray's object store on this machine: its memory, and the errors when it is full.

Ray makes the store as a sparse file in shared memory, or in its temporary folder where shared memory is too small. If
others take that room meanwhile, the kernel ends the process that writes to the store by SIGBUS: an engine, or the
driver, without a message. So all of the room is taken when the cluster starts.

When the store is full, Ray moves objects into files. When their disk is full too (by default, more than 95 %), Ray
refuses new objects.
"""

import os
from contextlib import suppress
from pathlib import Path

from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from cairn.storage.store.errors import NoSpace, naming_full

FULL = (ObjectStoreFullError, OutOfDiskError)
"""Errors that Ray raises where no room is left for an object."""


def reserve(raylet: int) -> None:
    """Take all the room that the store of a raylet may ever need. `raylet` is its process id. Raises NoSpace."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended, which `Cluster.watch` detects
        for descriptor in os.scandir(f"/proc/{raylet}/fd"):
            store = Path(os.readlink(descriptor.path))  # its name is gone by now: "/dev/shm/plasma1a2b3c (deleted)"
            if store.name.startswith("plasma"):
                with naming_full(f"{store.parent}, for Ray's object store"), open(descriptor.path, "rb+") as file:
                    os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def no_room(call: str, folder: Path | None) -> NoSpace:
    """Return the error for a call that found no room. `folder` is Ray's temporary folder; None for a joined
    cluster."""
    disk, else_ = "its disk", ""
    if folder is not None:
        disk, else_ = f"the disk of {folder}", ", or set TMPDIR to a folder on another disk and resume"
    return NoSpace(
        f"{call}: no space is left for Ray's objects: its object store is full, and {disk}, to which it spills, is "
        f"more than 95 % full; free space there{else_}"
    )
