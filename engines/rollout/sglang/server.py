"""A process that serves HTTP: started with a deadline, logged, and gone with its owner, however the owner ends."""

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

# The HTTP interface of an SGLang server, as far as Cairn uses it.


POLICY = {"selector": "target"}
"""Argument of a weight update: update the model that is served, and not layers that draft for it, which are not
trained. By default a server opens and loads both."""


LOADS = "/v1/loads"
"""Path of the numbers of requests that a server runs and queues."""


class Control:
    """Calls to a server other than generation: synchronous, each with a timeout.

    Every call raises EngineTimeout, EngineDied where nothing responds, and EngineError with the server's own words
    where it refuses.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=timeout, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> dict[str, Any]:
        """Send a POST, or a GET without a body. Returns the JSON of the reply, empty if it has none.

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
        """Replace weights with tensors that each of the server's tensor-parallel ranks maps
        (`cairn.engines.weights.buckets`). A weight update must have begun."""
        encoded = [base64.b64encode(handle).decode() for handle in handles]
        body = {"serialized_named_tensors": encoded, "flush_cache": False, **POLICY}
        self.call("/update_weights_from_tensor", body)


# Watch for a hung server or router. The watch turns a hung one into a dead one, which all callers can handle.
#
# A server is polled at intervals, through its HTTP process and its scheduler, and its response times are recorded. It
# hangs if it is silent for longer than three times the 99th percentile of its own response times, and at least for the
# configured seconds. Two thirds of that time are for one request, the rest for a second, new one. A busy scheduler
# responds between two batches, so that a long generation does not count as silence.


PROBE_PATH = "/server_info"
"""Path to which the scheduler responds without generating anything: an update of the weights must find no request."""

_REMEMBERED = 1000


class Watch:
    """A watch of one server, in a thread of its own.

    Args:
        url: URL of the server.
        interval: seconds between two polls.
        least: seconds of silence below which nothing counts as hung.
        on_hang: called once, with what was seen.
        first_wait: seconds until the first poll.
        name: name of the server, for messages.
        question: path that responds soon as long as the server works.
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
        question: str = PROBE_PATH,
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
        """Suspend judgement: the scheduler does something long on request, such as loading weights."""
        self._paused = True
        self._pauses += 1

    def resume(self) -> None:
        """Resume judgement."""
        self._paused = False

    def end(self) -> None:
        """End the watch."""
        self._ended.set()

    def _run(self) -> None:
        if self._ended.wait(self._first_wait):
            return
        with httpx.Client(base_url=self._url, trust_env=False) as http:
            while not self._ended.wait(self._interval):
                pauses, limit = self._pauses, self.limit
                if self._paused or any(self._responds(http, limit * part, pauses) for part in (2 / 3, 1 / 3)):
                    continue
                if not self._ended.is_set() and self._pauses == pauses:
                    self._on_hang(f"the {self._name} at {self._url} did not answer for {limit:.3g} s")
                    return

    def _responds(self, http: httpx.Client, seconds: float, pauses: int) -> bool:
        """Poll once, and return whether the server does not hang. A server that is gone does not hang; its users detect
        it. A response that had to wait for a pause does not count as a response time."""
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
"""Path that makes an SGLang server generate a token."""

_POLL = 0.25
_ANSWER = 10.0
"""Seconds that a response may take."""
_END = 30.0
"""Seconds that a killed process may take to be gone."""
_TAIL = 25
"""Lines of the log that an error shows."""
_TAIL_BYTES = 64 * 1024
"""Bytes at the end of the log from which these lines are taken."""
_ACCESS = re.compile(r'"[A-Z]+ /\S* HTTP/[\d.]+" \d{3}')
"""Pattern of lines that a request leaves in the log, which an error does not show."""


class Server:
    """A server's process and those that it starts, all in one process group.

    Args:
        host, port: address of the server, as its command sets it.
        log: file that its output is appended to.
        name: name of the server, for messages.
        ready: path that responds with 200 when the server is ready.
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
        """Start the process and return at once."""
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
        """Id of the process that serves HTTP; None once it is gone."""
        with suppress(psutil.NoSuchProcess):
            guards = psutil.Process(self._process.pid).children()
            return next((server.pid for guard in guards for server in guard.children()), None)
        return None

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def wait_ready(self, timeout: float) -> None:
        """Wait until the server is ready. Raises EngineDied and EngineTimeout with the end of its log; the server has
        then ended."""
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
        """End the process and everything that it started."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
        if self._process.returncode is None or self._process.returncode < 0:  # the guard was stopped, or killed itself
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_END)

    def last_words(self) -> str:
        """Return where the log is, and its end."""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        shown = [line for line in lines if not _ACCESS.search(line)]
        return f"its log is {self.log}:\n" + "\n".join(shown[-_TAIL:])


class ExternalServer:
    """A server that runs elsewhere: used, and neither started nor ended. It has the interface of a `Server`."""

    pid: int | None = None
    log: Path | None = None

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def alive(self) -> bool:
        """Return True: only the server's responses show whether it lives."""
        return True

    def wait_ready(self, timeout: float) -> None:
        """Wait until the server is ready. Raises EngineTimeout."""
        end = time.monotonic() + timeout
        with _client() as http:
            while not _serves(http, f"{self.url}{READY}"):
                if time.monotonic() > end:
                    raise EngineTimeout(
                        f"the SGLang server at {self.url} did not serve within {timeout:g} s: start it, or take it out "
                        "of rollout.external_urls"
                    )
                time.sleep(_POLL)

    def environment(self) -> Environment:
        """Return what the server computes on, as far as it reports: the type of its device and SGLang's version, by its
        address."""
        info = self.options()
        return Environment(
            device=f"{info.get('device', 'unknown')}, elsewhere",
            threads=0,
            host=self.url.rpartition("://")[2],
            versions={"sglang": str(info.get("version", "unknown"))},
        )

    def stop(self) -> None:
        """Leave the server as it is."""

    def options(self) -> dict[str, Any]:
        """Return the options that the server was started with, and more that it reports. Raises EngineDied and
        EngineTimeout."""
        control = Control(self.url, _ANSWER)
        try:
            return control.call("/server_info")
        finally:
            control.close()

    def last_words(self) -> str:
        """Return where to look for the log."""
        return f"it runs elsewhere, at {self.url}, where its log is"


def _client() -> httpx.Client:
    return httpx.Client(timeout=_ANSWER, trust_env=False)


def _serves(http: httpx.Client, url: str) -> bool:
    with suppress(httpx.HTTPError):
        return http.get(url).status_code == 200
    return False
