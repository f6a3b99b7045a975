"""Guard of a server: it runs a command in this process's group, and ends the whole group with it.

    python -I guard.py PARENT_PID COMMAND…

The group ends when the process that requested the command is gone, when the command ends, and on SIGTERM. Without the
guard a server would outlive a killed actor, because nothing notifies it. Ray kills the children of an actor that it
ends. So the guard is a child of a child, and ends the group also when that child is gone. If the guard itself is
killed, the kernel kills the command, and SGLang's other processes watch the command.

A killed process cannot remove the shared memory that it made. Python's resource trackers do so for their processes once
these are gone, and are therefore left to end by themselves. The guard removes what else the group has mapped, of the
kinds of shared memory that SGLang makes.
"""

import ctypes
import itertools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

TRACKER = b"multiprocessing.resource_tracker"
"""Text in the command line of a resource tracker."""

SHARED_MEMORY = "/dev/shm/"

PREFIXES = tuple(SHARED_MEMORY + maker for maker in ("psm_", "sem.mp-", "sgl_", "sglang_"))
"""Prefixes of the shared memory paths of Python's multiprocessing and of SGLang."""

LOOK_EVERY = 10
"""Half seconds between two checks of what the group has mapped."""

PATIENCE = 5.0
"""Seconds in which the group must be gone."""

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    if child := os.fork():
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return guard(os.pidfd_open(parent), os.getppid(), command)


def guard(owner: int, before: int, command: list[str]) -> int:
    """Run the command while the process of the descriptor `owner` lives, and this process's parent, whose id is
    `before`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    own = os.getpid()

    def die_with_the_guard() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != own:  # the guard ended before this call
            os._exit(1)

    segments: set[str] = set()
    with subprocess.Popen(command, preexec_fn=die_with_the_guard) as server:
        try:
            for turn in itertools.count():
                if server.poll() is not None or os.getppid() != before:
                    break
                if turn % LOOK_EVERY == 0:  # mappings of a killed process cannot be read any more
                    segments = _segments_of(_others())
                if select.select([owner], [], [], 0.5)[0]:
                    break
        finally:
            end_the_others(segments)
    return server.returncode


def end_the_others(segments: set[str]) -> None:
    """Kill the group except this process and its parent. Then remove `segments` and the other segments that the group
    has mapped."""
    give_up = time.monotonic() + PATIENCE
    while (others := list(_others())) and time.monotonic() < give_up:
        segments |= _segments_of(others)  # before the first is killed, since some of the others end with it
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT if TRACKER in _read(pid, "cmdline") else signal.SIGKILL)
        time.sleep(0.02)
    for pid in others:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for path in segments:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _others() -> Iterator[int]:
    """Yield the group's living processes, except this one and its parent."""
    own, group = (os.getpid(), os.getppid()), os.getpgid(0)
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with suppress(ProcessLookupError):
            if pid not in own and os.getpgid(pid) == group and _read(pid, "cmdline"):
                yield pid


def _segments_of(pids: Iterable[int]) -> set[str]:
    """Return the paths of the shared memory that processes have mapped, of the kinds that are removed here."""
    lines = (line for pid in pids for line in _read(pid, "maps").decode(errors="replace").splitlines())
    paths = (line[line.find("/") :] for line in lines if SHARED_MEMORY in line)
    return {path for path in paths if path.startswith(PREFIXES) and not path.endswith(" (deleted)")}


def _read(pid: int, file: str) -> bytes:
    """Return a file of /proc; nothing for a process that has ended."""
    with suppress(OSError), open(f"/proc/{pid}/{file}", "rb") as opened:
        return opened.read()
    return b""


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
