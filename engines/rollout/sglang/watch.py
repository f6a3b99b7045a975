"""Finds a server that hangs, or a router, and turns it into one that is dead: that is what everybody can handle.

A server is asked at intervals, through its HTTP process and its scheduler, and how long it takes is recorded. It
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
