"""One process that serves HTTP: started with a deadline, logged, and gone with its owner, however that ends."""

import base64
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout
from cairn.storage.records import Environment

# The HTTP interface of an SGLang server, as far as Cairn speaks it.


POLICY = {"selector": "target"}
"""In a weight update: of the model that is served, and not of layers that draft for it, which nobody trains. By default
a server opens and loads both."""


class Control:
    """Calls to a server other than generation: synchronous, each with a deadline.

    Every call raises EngineTimeout, EngineDied where nobody answers, and EngineError with the server's own words where
    it refuses.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=timeout, trust_env=False)

    def close(self) -> None:
        """Let go of the connections."""
        self._http.close()

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> dict[str, Any]:
        """POST, or GET where there is no body; returns the JSON of the reply, empty if it has none.

        `timeout`: seconds, for a call that may take longer than others.
        """
        try:
            method = "GET" if body is None else "POST"
            reply = self._http.request(method, path, json=body, timeout=timeout or self._http.timeout)
        except httpx.TimeoutException:
            raise EngineTimeout(f"the SGLang server at {self.url} did not answer {path} in time") from None
        except httpx.TransportError as error:
            lost = str(error) or type(error).__name__  # such as a connection that was reset while the server died
            raise EngineDied(f"the SGLang server at {self.url} is gone or out of reach: {path}: {lost}") from error
        content: Any = reply.json() if reply.headers.get("content-type", "").startswith("application/json") else {}
        if reply.status_code != 200 or (isinstance(content, dict) and content.get("success") is False):
            raise EngineError(f"{path} was refused ({reply.status_code}): {reply.text[:500]}")
        return content if isinstance(content, dict) else {}

    def update_from_tensor(self, handles: Sequence[bytes]) -> None:
        """Replace weights by tensors that each of the server's tensor-parallel ranks maps
        (`cairn.engines.weights.buckets`); a weight update must have begun."""
        encoded = [base64.b64encode(handle).decode() for handle in handles]
        body = {"serialized_named_tensors": encoded, "flush_cache": False, **POLICY}
        self.call("/update_weights_from_tensor", body)


# Finds a server that hangs, or a router, and turns it into one that is dead: that is what everybody can handle.
#
# A server is asked at intervals, through its HTTP process and its scheduler, and how long it takes is recorded. It
# hangs if it is silent for longer than three times the 99th percentile of its own answers, and at least the configured
# seconds: two thirds of that for one question, the rest for another one, asked anew. A busy scheduler answers between
# two batches, so that long responses do not count.


QUESTION = "/server_info"
"""Answered by the scheduler without generating anything: an update of the weights must find no request."""

_REMEMBERED = 1000


class Watch:
    """Watches one server from a thread of its own.

    Args:
        url: of the server.
        interval: seconds between two questions.
        least: seconds of silence below which nothing hangs.
        on_hang: called once, with what was seen.
        first_wait: seconds until the first question.
        name: what it is, for messages.
        question: path that it answers soon as long as it works.
    """

    def __init__(
        self,
        url: str,
        interval: float,
        least: float,
        on_hang: Callable[[str], None],
        *,
        first_wait: float = 0,
        name: str = "SGLang server",
        question: str = QUESTION,
    ) -> None:
        self._url = url
        self._name = name
        self._question = question
        self._interval = interval
        self._least = least
        self._first_wait = first_wait
        self._on_hang = on_hang
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._ended = threading.Event()
        self._paused = False
        self._pauses = 0
        threading.Thread(target=self._run, daemon=True, name="sglang-watch").start()

    @property
    def limit(self) -> float:
        """Seconds of silence after which the server counts as hung."""
        slowest = float(np.quantile(self._seconds, 0.99)) if self._seconds else 0.0
        return max(self._least, 3 * slowest)

    def pause(self) -> None:
        """Judge nothing from here on: the scheduler does something long on request, such as taking weights."""
        self._paused = True
        self._pauses += 1

    def resume(self) -> None:
        """Judge again."""
        self._paused = False

    def end(self) -> None:
        """Watch no more."""
        self._ended.set()

    def _run(self) -> None:
        if self._ended.wait(self._first_wait):
            return
        with httpx.Client(base_url=self._url, trust_env=False) as http:
            while not self._ended.wait(self._interval):
                pauses, limit = self._pauses, self.limit
                if self._paused or any(self._answers(http, limit * part, pauses) for part in (2 / 3, 1 / 3)):
                    continue
                if not self._ended.is_set() and self._pauses == pauses:
                    self._on_hang(f"the {self._name} at {self._url} did not answer for {limit:.3g} s")
                    return

    def _answers(self, http: httpx.Client, seconds: float, pauses: int) -> bool:
        """Ask. A server that is gone does not hang, and is found by whoever needs it. An answer that had to wait for a
        pause does not tell how long answers take."""
        began = time.monotonic()
        try:
            http.get(self._question, timeout=seconds)
        except httpx.TimeoutException:
            return False
        except httpx.TransportError:
            return True
        if self._pauses == pauses:
            self._seconds.append(time.monotonic() - began)
        return True


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
