"""Python processes that run somebody else's code: each fresh, with one connection, and ended with all that it
started."""

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
"""Signals that end a process, and are not of its own making."""

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
    """A process that calls `main` of a module with the number of a connection's file, that of this process, and
    `arguments`, which are to have a `repr`. `search`: its `sys.path`, by default that of this process. `files`: others
    that it has.

    The kernel ties it to the thread that starts it, where the module calls `die_with`."""
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
    """Whether it has, without waiting for it: then its group could not be killed any more."""
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
    """Whether one that is about to end has done so, in so many seconds. It is still to be waited for."""
    late = time.monotonic() + seconds
    while not has_ended(process):
        if time.monotonic() > late:
            return False
        time.sleep(_LOOK)
    return True


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """End it, and what it started and did not leave its group. It is still to be waited for."""
    # Until it is waited for, the process keeps its number, dead or alive.
    if process.returncode is None:
        # PermissionError: macOS, where all of the group has ended. ProcessLookupError: a Ctrl-C ended the process
        # before it had a group of its own.
        with suppress(PermissionError, ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def kill_family(process: "subprocess.Popen[bytes]") -> None:
    """End it, and all that it started and that started, in whatever group, where it calls `adopt_orphans`. It is still
    to be waited for."""
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
    """In the process: have the kernel kill it when its parent ends, even if it is busy and whatever way that ends.

    Elsewhere than on Linux it ends when it next looks for work.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def adopt_orphans() -> None:
    """In the process: what is started below it stays below it when the process between them ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
