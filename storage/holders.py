"""Which process holds a lease, and whether it is still there, as far as this machine can tell."""

import os
import socket
import uuid
from pathlib import Path

import psutil

from cairn.storage.records import Record

_SAME_START = 2.0
"""Seconds by which two readings of one process's start time may differ: it is derived from an adjustable clock."""
_START_FIELD = 22
"""Of /proc/<pid>/stat: clock ticks between the boot and the start of the process."""


class Holder(Record):
    """A driver's process."""

    id: str
    """Random: no two holders are equal."""
    host: str
    machine: str
    """Boot of the kernel, process and time namespace: where equal, `pid` and `start_ticks` can be looked up."""
    pid: int
    process_started_at: float
    """Unix seconds, by a clock that may be set meanwhile."""
    start_ticks: int | None = None
    """Clock ticks of the kernel from its boot to the start of the process: with boot and namespaces they make `pid` one
    process. None in a lease that an earlier version wrote."""

    @classmethod
    def this_process(cls) -> "Holder":
        """The calling process, with a new id."""
        return cls(
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            process_started_at=psutil.Process().create_time(),
            start_ticks=_start_ticks(os.getpid()),
        )

    def is_gone(self) -> bool | None:
        """Whether the process has ended; None where this machine cannot tell."""
        if not self.machine or self.machine != _machine():
            return None
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            if self.start_ticks is not None:
                return _start_ticks(self.pid) != self.start_ticks
            # Another process may have the number now, or somebody has set the clock.
            same = abs(process.create_time() - self.process_started_at) < _SAME_START
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            return True
        return False if same else None


def _machine() -> str:
    """Empty where the kernel does not say: then nobody is known to be on this machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return ""
    # In a time namespace of its own, ticks since the boot are other ones; older kernels have none.
    namespaces = [file.stat().st_ino for name in ("pid", "time") if (file := Path("/proc/self/ns", name)).exists()]
    return " ".join([boot.read_text().strip(), *map(str, namespaces)])


def _start_ticks(pid: int) -> int | None:
    """None where there is no /proc. Raises FileNotFoundError or ProcessLookupError without such a process."""
    if not Path("/proc/self/stat").exists():
        return None
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may hold anything
    return int(after_name[_START_FIELD - 3])
