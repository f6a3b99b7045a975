"""Python processes that run foreign code: each is a fresh interpreter with one connection, and is killed with its
descendants."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil

EXTERNAL_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGBUS, signal.SIGPWR}
)
"""Signals that a process does not cause itself: it was killed from outside."""

OUTPUT = Path(".cairn/output")
"""Folder for what foreign code prints, below the working directory, on the machine of its process."""
_MOST_OUTPUT = 2**24
"""Bytes of a file there from which on the next process begins it anew."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 5
_LOOK = 0.01


TO_END = 10.0
"""Seconds that a process may take to exit after it closed its connection."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    """Exit code as in Popen: the negative number of the signal that ended it."""
    hung_up: bool
    """Whether it had closed its connection and kept running."""

    @property
    def from_outside(self) -> bool:
        """Whether it was killed from outside, as by the OOM killer."""
        return not self.hung_up and -self.code in EXTERNAL_SIGNALS

    @property
    def signal(self) -> str | None:
        """Name of the signal that ended it; None where it exited."""
        if self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:  # a real-time signal has a number alone
            return f"signal {-self.code}"


def output_file(source: str) -> Path:
    """Return the file for what code prints. `source`: its name, such as `rewards.py:grade`."""
    return OUTPUT / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', source.rpartition('/')[2])}.log"


@contextmanager
def _opened(source: str | None) -> Iterator[int]:
    """Open the file for what code prints; yield stderr where there is none: prints are no output of this program."""
    try:
        if source is None:
            raise OSError
        file = output_file(source)
        file.parent.mkdir(parents=True, exist_ok=True)
        mode = "wb" if file.exists() and file.stat().st_size > _MOST_OUTPUT else "ab"
        opened = file.open(mode)
    except OSError:  # such as a folder that cannot be written
        yield 2
        return
    with opened:
        yield opened.fileno()


class Child:
    """A fresh Python process that runs foreign code, with a connection to it.

    It calls `main` of a module. The arguments of `main` are the file descriptor of the connection, the id of this
    process, and `arguments`. The kernel kills the process with the thread that starts it, where the module calls
    `die_with`.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[Any] = (),
        *,
        search: Sequence[str] | None = None,
        files: Sequence[int] = (),
        adopts_orphans: bool = False,
        source: str | None = None,
    ) -> None:
        """Start the process.

        Args:
            arguments: values that `repr` can reproduce.
            search: the `sys.path` of the process, by default that of this process.
            files: other file descriptors that it inherits.
            source: name of the code, for the file of what it prints; None: it prints to stderr.
            adopts_orphans: whether the module calls `adopt_orphans`, so that all descendants can be killed with it.
        """
        self.connection, there = Pipe()
        self._adopts_orphans = adopts_orphans
        self._lock = threading.Lock()
        with there, _opened(source) as output:
            main_arguments = (there.fileno(), os.getpid(), *arguments)
            path = list(sys.path if search is None else search)
            code = f"import sys; sys.path[:] = {path!r}; from {module} import main; main(*{main_arguments!r})"
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],  # a print is there when the process is killed after it
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[there.fileno(), *files],
                start_new_session=True,  # its descendants are killed with it; the driver handles Ctrl-C
                env={**os.environ, "PYTHONHASHSEED": "0"},  # every process walks its sets in the same order
            )

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended. Does not reap it: afterwards its group could not be killed any more."""
        if not hasattr(os, "waitid"):  # macOS
            try:
                return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended and left no message. What it started may hold the connection open."""
        return self.has_ended and not self.connection.poll()

    def wait(self) -> Ended:
        """Wait for the end of a process that closed its connection, at most `TO_END` seconds, and kill what is left."""
        late = time.monotonic() + TO_END
        while not (ended := self.has_ended) and time.monotonic() < late:
            time.sleep(_LOOK)
        return Ended(self.kill(), hung_up=not ended)

    def kill(self) -> int:
        """Kill the process with its descendants, and reap it. Return the exit code as in Popen.

        Descendants that left its process group survive, unless it adopts orphans.
        """
        with self._lock:
            self._kill()
            return self._process.wait()

    def interrupt(self) -> None:
        """Kill the process with its descendants, for another thread, which notices it and calls `kill`."""
        with self._lock:
            self._kill()

    def _kill(self) -> None:
        # A process keeps its id, dead or alive, until it is reaped.
        if self._process.returncode is not None:
            return
        if self._adopts_orphans:
            self._kill_descendants()
        # PermissionError: macOS, where all of the group has ended. ProcessLookupError: a Ctrl-C ended the process
        # before it had a group of its own.
        with suppress(PermissionError, ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _kill_descendants(self) -> None:
        with suppress(psutil.NoSuchProcess, PermissionError):
            head = psutil.Process(self.pid)
            head.suspend()  # while it exists, it adopts the orphans of the others
            for _ in range(_ROUNDS):
                others = head.children(recursive=True)
                for other in others:
                    with suppress(psutil.NoSuchProcess):
                        other.kill()
                if all(other.status() == psutil.STATUS_ZOMBIE for other in others if other.is_running()):
                    break


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
