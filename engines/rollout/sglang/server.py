"""One SGLang server: started with a deadline, keeps a log, and leaves nothing behind however its owner ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from engines.errors import EngineDied, EngineTimeout

GUARD = Path(__file__).with_name("guard.py")

_POLL = 0.2
_END = 30.0
"""Seconds that a killed process may take to be gone."""
_TAIL = 25
"""Lines of the log that an error shows."""


class Server:
    """A server's process and those that it starts, all in one process group."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], port: int, log: Path) -> None:
        """Start it and return at once."""
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(GUARD), str(os.getpid()), *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the process that answers HTTP."""
        return psutil.Process(self._process.pid).children()[0].pid

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def wait_ready(self, timeout: float) -> None:
        """Return when it serves. Raises EngineDied and EngineTimeout, the server ended, with the end of its log."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if not self.alive():
                raise EngineDied(f"the SGLang server ended while it started; {self.last_words()}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            time.sleep(_POLL)
        self.stop()
        raise EngineTimeout(f"the SGLang server did not serve within {timeout:g} s; {self.last_words()}")

    def stop(self) -> None:
        """Kill it and everything it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_END)

    def last_words(self) -> str:
        """Where the log is, and its end."""
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL:]
        return f"its log is {self.log}:\n" + "\n".join(lines)


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
