"""Ends samples whose code takes too long: one that waits without end alone, one that keeps the others from their turn
with the whole process.

A thread of the process does, which has no turn itself where code keeps the interpreter's lock: that the parent sees
from its heartbeat."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cairn.engines.episodes.heartbeat import Heartbeat
from cairn.engines.episodes.runner import Runner
from cairn.engines.trajectories import SampleKey, SampleRequest

TICK = 1.0
"""Seconds between two looks, at most."""


class Watchdog:
    """Of the samples of a call, while it runs; a context of the thread that runs their loop.

    Args:
        seconds: that a sample may take from its begin, or an answer of the engine, until it asks the engine or ends;
            what it waits for while others have it is not counted.
        in_all: that it may take from its begin to its end; None has no bound.
        hung: told the sample whose code does not give the loop back, None where that cannot be known, and a sentence.
        heartbeat: beats while it runs.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runner: Runner,
        samples: Sequence[SampleRequest],
        seconds: float,
        in_all: float | None,
        hung: Callable[[tuple[SampleKey | None, str]], None],
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._loop = loop
        self._runner = runner
        self._seconds = seconds
        self._in_all = in_all
        self._began = time.monotonic()
        self._hung = hung
        self._heartbeat = heartbeat
        self._since = {sample.key: self._now(sample.key) for sample in samples}
        self._turned = time.monotonic()
        """When the loop last came round."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._tick = min(TICK, seconds / 4, (in_all or seconds) / 4)

    def __enter__(self) -> "Watchdog":
        self._look()
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._next.cancel()
        self._thread.join()
        if self._heartbeat is not None:
            self._heartbeat.rest()

    def goes_on(self, key: SampleKey) -> None:
        """A sample has an answer."""
        self._since[key] = self._now(key)

    def _look(self) -> None:
        """On the loop."""
        self._turned = now = time.monotonic()
        for key in self._runner.working:
            if self._now(key) - self._since[key] > self._seconds:
                told = f"it took longer than {self._seconds:g} s without the engine"
                self._runner.give_up(key, f"generate: GenerateTimeout: {told}")
        if self._in_all is not None and now - self._began > self._in_all:  # all of them have begun with it
            for key in self._runner.unfinished:
                told = f"it took longer than {self._in_all:g} s in all"
                self._runner.give_up(key, f"generate: EpisodeTimeout: {told}")
        self._next = self._loop.call_later(self._tick, self._look)

    def _now(self, key: SampleKey) -> float:
        """By the clock of a sample, which stands while it waits for what others have."""
        return time.monotonic() - self._runner.waits.seconds(key)

    def _watch(self) -> None:
        """In a thread, since the loop does not come round where a sample keeps it."""
        while not self._over.wait(self._tick):
            self._beat()
            if time.monotonic() - self._turned > self._seconds + self._tick:
                self._hung((self._runner.current(), blocked(self._seconds)))
                return

    def _beat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat()


def blocked(seconds: float) -> str:
    """The error of a sample that kept all others waiting."""
    told = f"it kept all others waiting for longer than {seconds:g} s: let it await what it does"
    return f"generate: LoopBlocked: {told}"
