"""Ends what a killed driver leaves behind: it outlives the driver until nothing of the driver's own cluster is left.

    python -I -S reaper.py FOLDER DRIVER_PID        stdin: a pipe that the driver holds open

Ray's processes notice at their own pace that their driver is gone; some take most of a minute, a stopped or hung one
need not notice at all. All of them, and whatever they start, write into a log file in the cluster's folder: by that
they are known, and who only reads there, as a person who looks at a log, is left alone. Among them are PyTorch's
helpers, which would have removed the shared memory of those that were killed or had ended before this looked: of the
latter the names of Ray's logs tell.
A byte on the pipe says that the driver has closed its cluster itself.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator

PATIENCE = 60.0
"""Seconds after which processes that cannot be killed are left to the kernel."""

SHARED_MEMORY = "/dev/shm"

SEGMENT = re.compile(r"torch_(\d+)_")
"""Beginning of the names that PyTorch gives: with the process that made the segment."""

WORKER_LOG = re.compile(r"worker-.*-(\d+)\.out")
"""Names that Ray gives, in the logs of a session: with the worker's process."""


def main(folder: str, driver: int) -> None:
    # The parent is looked at too: a child that the driver forked keeps the pipe open after the driver's end.
    while os.getppid() == driver:
        ready, _, _ = select.select([sys.stdin], [], [], 1.0)
        if ready:
            if os.read(sys.stdin.fileno(), 1):
                return
            break
    end_processes_writing_in(folder)
    shutil.rmtree(folder, ignore_errors=True)


def end_processes_writing_in(folder: str) -> None:
    """Kill them until there are none; remove the shared memory that PyTorch made in them, and in workers that had ended
    before."""
    give_up, makers = time.monotonic() + PATIENCE, _workers_of(folder)
    while (pids := processes_writing_in(folder)) and time.monotonic() < give_up:
        for pid in pids:
            _kill(pid)
        makers.update(pids)
        time.sleep(0.05)
    for name in os.listdir(SHARED_MEMORY):
        maker = SEGMENT.match(name)
        if maker and int(maker[1]) in makers and not os.path.exists(f"/proc/{maker[1]}/exe"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(SHARED_MEMORY, name))


def _workers_of(folder: str) -> set[int]:
    """All workers that Ray ever had there."""
    names = (name for _, _, names in os.walk(folder) for name in names)
    return {int(worker[1]) for name in names if (worker := WORKER_LOG.fullmatch(name))}


def processes_writing_in(folder: str) -> list[int]:
    """Processes, other than this, that have a file anywhere below the folder open to write. Zombies have none."""
    own, prefix = os.getpid(), os.path.join(folder, "")
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [pid for pid in pids if pid != own and any(path.startswith(prefix) for path in _written_files(pid))]


def _written_files(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it belongs to another user, or has ended
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it was closed while we looked
                if _is_open_to_write(pid, descriptor):
                    yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


def _is_open_to_write(pid: int, descriptor: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{descriptor}") as file:
        flags = next(line.split()[1] for line in file if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
