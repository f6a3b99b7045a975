"""Ends what a killed driver leaves behind: it outlives the driver until nothing of the driver's own cluster is left.

    python -I -S reaper.py FOLDER DRIVER_PID        stdin: a pipe that the driver holds open

Ray's processes notice at their own pace that their driver is gone; some take most of a minute, a stopped or hung one
need not notice at all. All of them, and whatever they start, have a log file in the cluster's folder open: by that they
are known. Among them are PyTorch's helpers, which would have removed the shared memory of those that were killed or
had ended before this looked: of the latter the names of Ray's logs tell.
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
    end_processes_with_files_in(folder)
    shutil.rmtree(folder, ignore_errors=True)


def end_processes_with_files_in(folder: str) -> None:
    """Kill them until there are none; remove the shared memory that PyTorch made in them, and in workers that had ended
    before."""
    give_up, makers = time.monotonic() + PATIENCE, _workers_of(folder)
    while (pids := processes_with_files_in(folder)) and time.monotonic() < give_up:
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


def processes_with_files_in(folder: str) -> list[int]:
    """Processes, other than this, that have a file anywhere below the folder open. Zombies have none."""
    own, prefix = os.getpid(), os.path.join(folder, "")
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [pid for pid in pids if pid != own and any(path.startswith(prefix) for path in _open_files(pid))]


def _open_files(pid: int) -> list[str]:
    paths = []
    with contextlib.suppress(OSError):  # it ended while we looked, or belongs to another user
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            paths.append(os.readlink(descriptor.path))
    return paths


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
