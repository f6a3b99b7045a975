"""Python processes that run foreign code: each is a fresh interpreter with one connection, and is killed with its
descendants."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

FROM_OUTSIDE = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGBUS, signal.SIGPWR}
)
"""Signals that a process does not cause itself: it was killed from outside."""

_STDERR = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 5
_LOOK = 0.01


def launch(
    module: str,
    connection: Connection,
    arguments: Sequence[Any] = (),
    search: Sequence[str] | None = None,
    files: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start a process that calls `main` of a module.

    The arguments of `main` are the file descriptor of a connection, the id of this process, and `arguments`. The kernel
    kills the process with the thread that starts it, where the module calls `die_with`.

    Args:
        arguments: values that `repr` can reproduce.
        search: the `sys.path` of the process, by default that of this process.
        files: other file descriptors that it inherits.
    """
    given = (connection.fileno(), os.getpid(), *arguments)
    path = list(sys.path if search is None else search)
    code = f"import sys; sys.path[:] = {path!r}; from {module} import main; main(*{given!r})"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,  # what such code prints is no output of this program
        pass_fds=[connection.fileno(), *files],
        start_new_session=True,  # what it starts is killed with it; Ctrl-C is the driver's affair
        env={**os.environ, "PYTHONHASHSEED": "0"},  # every process walks its sets in the same order
    )


def has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Return whether a process has ended, without reaping it: afterwards its group could not be killed any more."""
    if not hasattr(os, "waitid"):  # macOS
        try:
            return psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def ends_within(seconds: float, process: "subprocess.Popen[bytes]") -> bool:
    """Return whether a process ends within so many seconds. The caller still has to reap it."""
    late = time.monotonic() + seconds
    while not has_ended(process):
        if time.monotonic() > late:
            return False
        time.sleep(_LOOK)
    return True


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its descendants that did not leave its process group. The caller still has to reap it."""
    # A process keeps its id, dead or alive, until it is reaped.
    if process.returncode is None:
        # PermissionError: macOS, where all of the group has ended. ProcessLookupError: a Ctrl-C ended the process
        # before it had a group of its own.
        with suppress(PermissionError, ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def kill_family(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all its descendants, of whatever process group, where it calls `adopt_orphans`. The caller
    still has to reap it."""
    if process.returncode is None:
        with suppress(psutil.NoSuchProcess, PermissionError):
            head = psutil.Process(process.pid)
            head.suspend()  # it lives on until the others are gone, or their orphans would be somebody else's
            for _ in range(_ROUNDS):
                others = head.children(recursive=True)
                for other in others:
                    with suppress(psutil.NoSuchProcess):
                        other.kill()
                if all(other.status() == psutil.STATUS_ZOMBIE for other in others if other.is_running()):
                    break
    kill_group(process)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends in any way, even while it is busy.

    On other systems than Linux it ends when it next waits for work.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def adopt_orphans() -> None:
    """Make this process the new parent of descendants whose own parent has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
