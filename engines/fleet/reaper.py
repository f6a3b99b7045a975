"""Cleanup after a killed driver: this process outlives the driver until nothing of the driver's own cluster is left.

    python -I -S reaper.py FOLDER DRIVER_PID        stdin: a pipe that the driver holds open

Ray's processes notice late that their driver is gone: some take most of a minute, and a stopped or hung one may never
notice. All of them, and the processes that they start, write into a log file in the cluster's folder. This identifies
them. A process that only reads there, such as a person's view of a log, is left alone. PyTorch's helpers are among the
killed processes. They would have removed the shared memory of processes that were killed, or that had ended before, so
this process removes it. The names of Ray's logs identify the processes that had ended before.
A byte on the pipe says that the driver has closed its cluster itself.
"""

import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

PATIENCE = 60.0
"""Seconds after which processes that cannot be killed are left to the kernel."""

SHARED_MEMORY = "/dev/shm"

SEGMENT = re.compile(r"torch_(\d+)_")
"""Beginning of the names of PyTorch's shared memory segments, with the id of the process that made the segment."""

WORKER_LOG = re.compile(r"worker-.*-(\d+)\.out")
"""Names of workers' logs in a Ray session, with the id of the worker's process."""


def main(folder: str, driver: int) -> None:
    # The parent is checked too: a child that the driver forked keeps the pipe open after the driver's end.
    while os.getppid() == driver:
        ready, _, _ = select.select([sys.stdin], [], [], 1.0)
        if ready:
            if os.read(sys.stdin.fileno(), 1):
                return
            break
    end_processes_writing_in(folder)
    shutil.rmtree(folder, ignore_errors=True)


def end_processes_writing_in(folder: str) -> None:
    """Kill the processes that write in the folder until there are none. Then remove the shared memory that PyTorch made
    in them, and in workers that had ended before."""
    give_up, makers = time.monotonic() + PATIENCE, _workers_of(folder)
    while (pids := processes_writing_in(folder)) and time.monotonic() < give_up:
        for pid in pids:
            _kill(pid)
        makers.update(pids)
        time.sleep(0.05)
    for name in os.listdir(SHARED_MEMORY):
        maker = SEGMENT.match(name)
        if maker and int(maker[1]) in makers and not os.path.exists(f"/proc/{maker[1]}/exe"):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(SHARED_MEMORY, name))


def _workers_of(folder: str) -> set[int]:
    """Return the process ids of all workers that Ray ever had there."""
    names = (name for _, _, names in os.walk(folder) for name in names)
    return {int(worker[1]) for name in names if (worker := WORKER_LOG.fullmatch(name))}


def processes_writing_in(folder: str) -> list[int]:
    """Return the ids of processes, other than this one, that have a file below the folder open for writing. Zombies
    have none."""
    own, prefix = os.getpid(), os.path.join(folder, "")
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [pid for pid in pids if pid != own and any(path.startswith(prefix) for path in _written_files(pid))]


def _written_files(pid: int) -> Iterator[str]:
    with suppress(OSError):  # it belongs to another user, or has ended
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it was closed meanwhile
                if _is_open_to_write(pid, descriptor):
                    yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


def _is_open_to_write(pid: int, descriptor: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{descriptor}") as file:
        flags = next(line.split()[1] for line in file if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
