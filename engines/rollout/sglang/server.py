"""One process that serves HTTP: started with a deadline, logged, and gone with its owner, however that ends."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from cairn.engines.errors import EngineDied, EngineTimeout
from cairn.engines.rollout.sglang.client import Control
from cairn.storage.commits import Environment

GUARD = Path(__file__).with_name("guard.py")

READY = "/health_generate"
"""Has an SGLang server generate a token."""

_POLL = 0.25
_ANSWER = 10.0
"""Seconds that an answer may take."""
_END = 30.0
"""Seconds that a killed process may take to be gone."""
_TAIL = 25
"""Lines of the log that an error shows,"""
_TAIL_BYTES = 64 * 1024
"""of this end of it, and"""
_ACCESS = re.compile(r'"[A-Z]+ /\S* HTTP/[\d.]+" \d{3}')
"""none of those that a request leaves."""


class Server:
    """A server's process and those that it starts, all in one process group.

    Args:
        host, port: where it answers, as the command tells it.
        log: file that its output is appended to.
        name: what it is, for messages.
        ready: path that answers 200 when it serves.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        port: int,
        log: Path,
        *,
        host: str = "127.0.0.1",
        name: str = "SGLang server",
        ready: str = READY,
    ) -> None:
        """Start it and return at once."""
        self.url = f"http://{host}:{port}"
        self.log = log
        self._name = name
        self._ready = ready
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
    def pid(self) -> int | None:
        """Of the process that answers HTTP; None once it is gone."""
        with suppress(psutil.NoSuchProcess):
            guards = psutil.Process(self._process.pid).children()
            return next((server.pid for guard in guards for server in guard.children()), None)
        return None

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def wait_ready(self, timeout: float) -> None:
        """Return when it serves. Raises EngineDied and EngineTimeout, the server ended, with the end of its log."""
        end = time.monotonic() + timeout
        with _client() as http:
            while time.monotonic() < end:
                if not self.alive():
                    raise EngineDied(f"the {self._name} ended while it started; {self.last_words()}")
                if _serves(http, f"{self.url}{self._ready}"):
                    return
                time.sleep(_POLL)
        self.stop()
        raise EngineTimeout(f"the {self._name} did not serve within {timeout:g} s; {self.last_words()}")

    def stop(self) -> None:
        """End it and everything it started."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
        if self._process.returncode is None or self._process.returncode < 0:  # the guard was stopped, or killed itself
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_END)

    def last_words(self) -> str:
        """Where the log is, and its end."""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        told = [line for line in lines if not _ACCESS.search(line)]
        return f"its log is {self.log}:\n" + "\n".join(told[-_TAIL:])


class ExternalServer:
    """A server that runs elsewhere: used, and neither started nor ended. It has the face of a `Server`."""

    pid: int | None = None
    log: Path | None = None

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def alive(self) -> bool:
        """Always: only its answers tell."""
        return True

    def wait_ready(self, timeout: float) -> None:
        """Return when it serves. Raises EngineTimeout."""
        end = time.monotonic() + timeout
        with _client() as http:
            while not _serves(http, f"{self.url}{READY}"):
                if time.monotonic() > end:
                    raise EngineTimeout(
                        f"the SGLang server at {self.url} did not serve within {timeout:g} s: start it, or take it out "
                        "of rollout.external_urls"
                    )
                time.sleep(_POLL)

    def is_deterministic(self) -> bool:
        """Whether it was started with deterministic inference. Raises EngineDied and EngineTimeout."""
        return bool(self.options().get("enable_deterministic_inference"))

    def environment(self) -> Environment:
        """What it computes on, as far as it says: the kind of its device and SGLang's version, by its address."""
        info = self.options()
        return Environment(
            device=f"{info.get('device', 'unknown')}, elsewhere",
            threads=0,
            host=self.url.rpartition("://")[2],
            versions={"sglang": str(info.get("version", "unknown"))},
        )

    def stop(self) -> None:
        """Leave it as it is."""

    def options(self) -> dict[str, Any]:
        """What it was started with, and more that it says of itself. Raises EngineDied and EngineTimeout."""
        control = Control(self.url, _ANSWER)
        try:
            return control.call("/server_info")
        finally:
            control.close()

    def last_words(self) -> str:
        """Where to look."""
        return f"it runs elsewhere, at {self.url}, and so does its log"


def _client() -> httpx.Client:
    return httpx.Client(timeout=_ANSWER, trust_env=False)


def _serves(http: httpx.Client, url: str) -> bool:
    with suppress(httpx.HTTPError):
        return http.get(url).status_code == 200
    return False
