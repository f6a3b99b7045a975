"""Finds a server that hangs, and turns it into one that is dead: that is what everybody can handle.

The server is asked at intervals, through its HTTP process and its scheduler, and how long it takes is recorded. It
hangs if it is silent for longer than three times the 99th percentile of its own answers, and at least the configured
seconds: two thirds of that for one question, the rest for another one, asked anew. A busy scheduler answers between two
batches, so that long responses do not count.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

import httpx
import numpy as np

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
    """

    def __init__(self, url: str, interval: float, least: float, on_hang: Callable[[str], None]) -> None:
        self._url = url
        self._interval = interval
        self._least = least
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
        with httpx.Client(base_url=self._url, trust_env=False) as http:
            while not self._ended.wait(self._interval):
                pauses, limit = self._pauses, self.limit
                if self._paused or self._answers(http, limit * 2 / 3) or self._answers(http, limit / 3):
                    continue
                if not self._ended.is_set() and self._pauses == pauses:
                    self._on_hang(f"the SGLang server at {self._url} did not answer for {limit:.3g} s")
                    return

    def _answers(self, http: httpx.Client, seconds: float) -> bool:
        """Ask. A server that is gone does not hang, and is found by whoever needs it."""
        began = time.monotonic()
        try:
            http.get(QUESTION, timeout=seconds)
        except httpx.TimeoutException:
            return False
        except httpx.TransportError:
            return True
        self._seconds.append(time.monotonic() - began)
        return True
