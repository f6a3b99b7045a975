"""Watchers of a run: trackers, alarms, displays. They receive the driver's events and change nothing.

| a watcher that | costs the run |
|---|---|
| is slow | nothing: it has its own thread and queue |
| is very slow | nothing: of more than `QUEUE` waiting events the oldest are dropped. Their content is in the ledger |
| raises | one warning; it receives no further events |
| does not end | `CLOSE_SECONDS`, or `STOP_SECONDS` of a driver that ends early, and one warning |

The terminal's watcher is called first, in the thread that emits the event.
"""

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol

from cairn.flows.events import Event, OnEvent
from cairn.tasks.durable.events import Message

QUEUE = 4096
"""Number of events that wait for one watcher at most: a few iterations with a hundred shards."""

CLOSE_SECONDS = 60.0
STOP_SECONDS = 3.0


class Watcher(Protocol):
    """Receives the events of `cairn.flows.events` in their order, then one of `close` and `stop`, all in one thread.

    Events may be missing where the watcher was too slow. Each is handled in the context of the thread that emitted it,
    so that Prefect's client finds the flow run there.
    """

    def __call__(self, event: Event) -> None:
        """Handle an event."""

    def close(self) -> None:
        """Finish pending work: the run has reached its last iteration."""

    def stop(self) -> None:
        """Release resources and do no work: the driver ends early, or the watcher has failed."""


class Watchers:
    """Calls `on_event` synchronously and all watchers asynchronously. Thread-safe."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._queues: list[_WatcherQueue] = []

    def __call__(self, event: Event) -> None:
        self._on_event(event)
        context = contextvars.copy_context()
        for queue in self._queues:
            queue.put(partial(context.copy().run, queue.watcher, event))

    @contextmanager
    def attached(self, watchers: Mapping[str, Watcher]) -> Iterator[None]:
        """Send events to these watchers too while the block runs; warnings use their names. An error of the block stops
        them; otherwise they are closed."""
        self._queues = [_WatcherQueue(name, watcher, self) for name, watcher in watchers.items()]
        try:
            yield
        except BaseException:
            self._end(STOP_SECONDS, _WatcherQueue.stop)
            raise
        self._end(CLOSE_SECONDS, _WatcherQueue.close)

    def settle(self, seconds: float = CLOSE_SECONDS) -> None:
        """Return when every watcher has handled all events so far, or after `seconds`."""
        deadline = time.monotonic() + seconds
        for queue in self._queues:
            queue.wait(deadline)

    def _end(self, seconds: float, end: "Callable[[_WatcherQueue], None]") -> None:
        deadline = time.monotonic() + seconds
        for queue in self._queues:
            end(queue)
        for queue in self._queues:
            if not queue.join(deadline):
                text = f"{queue.name} did not finish within {seconds:.0f} s and is abandoned"
                self._on_event(Message(text, "warning"))
        self._queues = []


class _WatcherQueue:
    """The queue and the thread of one watcher."""

    def __init__(self, name: str, watcher: Watcher, emit: OnEvent) -> None:
        self.name, self.watcher = name, watcher
        self._emit = emit
        self._jobs: deque[Callable[[], None]] = deque()
        self._end: Callable[[], None] | None = None
        self._changed = threading.Condition()
        self._busy = self._over = False
        self._thread = threading.Thread(target=self._work, name=f"watcher-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        with self._changed:
            if self._over or self._end is not None:
                return
            if len(self._jobs) >= QUEUE:
                self._jobs.popleft()
            self._jobs.append(job)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._end = self.watcher.close
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._jobs.clear()
            self._end = self.watcher.stop
            self._changed.notify_all()

    def wait(self, deadline: float) -> None:
        with self._changed:
            timeout = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: self._over or not (self._jobs or self._busy), timeout)

    def join(self, deadline: float) -> bool:
        """Wait for the end of the thread; return whether it has ended by the deadline."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
            assert self._end is not None
            self._end()
        except (Exception, SystemExit) as error:
            with self._changed:
                self._over = True
                self._jobs.clear()
                self._changed.notify_all()
            with suppress(Exception, SystemExit):
                self.watcher.stop()
            why = next(iter(str(error).splitlines()), type(error).__name__)
            self._emit(Message(f"{self.name} is off for the rest of this driver: {why}. The run continues", "warning"))

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next job and return it; None when the thread must end."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._jobs) or self._end is not None)
            self._busy = bool(self._jobs)
            return self._jobs.popleft() if self._jobs else None
