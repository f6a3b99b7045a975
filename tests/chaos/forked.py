"""Drivers that need not wait for imports: forked by a process that has made them.

Such a driver is a process like any other, in a session of its own, with an environment, a working folder and a log of
its own, and is killed like any other. What it starts is started afresh.
"""

import atexit
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.forks import FORKS, set_environment


class ForkedDriver:
    """`tests.chaos.driver` with the given arguments; what `subprocess.Popen` says of a process, as far as is needed."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> None:
        self._process = FORKS.Process(target=_drive, args=(list(arguments), dict(environment), folder, log))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("driver", timeout or 0)
        return code

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


def _drive(arguments: list[str], environment: dict[str, str], folder: Path, log: Path) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from tests.chaos.driver import main

    os.setsid()
    set_environment(environment)
    os.chdir(folder)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    with ExitStack() as stack:
        # What other programs do when they end, in this order: Prefect's last logs go to a server that still serves.
        stack.callback(atexit._run_exitfuncs)
        stack.callback(threading._shutdown)
        if "PREFECT_API_URL" in environment:  # Prefect has read its settings when it was imported
            stack.enter_context(temporary_settings({PREFECT_API_URL: environment["PREFECT_API_URL"]}))
        main(*arguments)
