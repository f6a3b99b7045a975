"""Early end of a driver: in order, and before a deadline.

| request | reaction of the driver |
|---|---|
| SIGINT | stops its work and releases the run as stopped |
| SIGTERM, SIGUSR1, Ray drains one of its machines, Cancel in Prefect | makes a checkpoint, releases it as preempted |
| another of these after that, or a second SIGINT | tries to release the run for a moment, and exits at once |
| `operations.grace_period` seconds have passed | the same |

Work stops in this way: no step begins or is retried. Generations are aborted, after their finished samples are durable.
A call of the training engine completes, because an update that has begun cannot be undone and may count.

A thread receives the signals, through Python's wakeup file descriptor. Signal handlers are not reliable: within a flow,
Prefect installs its own, and Ray swallows their exceptions while it waits for a result. An exception from a handler
only shortens a wait.
"""

import contextvars
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType

from cairn.flows.driver.signals import EXIT_CODE, INTERRUPTED, NOTICES, exit_preempted
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.leases import Lease, Outcome
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.selection import last_selection
from cairn.tasks.trainer.checkpoint import checkpoint

GRACE = 30.0
"""Grace period in seconds, until the run's configuration is known."""

RELEASE_TIMEOUT = 2.0
"""Seconds that releasing the run may take when the process exits at once."""

SAME_KEY = 0.5
"""Seconds within which a second SIGINT counts as the same Ctrl-C, forwarded by a program that started the driver."""

ABORT_INTERVAL = 1.0
"""Seconds between two aborts of generations, for generations that began meanwhile."""

DRAIN_INTERVAL = 2.0
"""Seconds between two queries to Ray."""


class Preempted(BaseException):
    """The driver was requested to end. Not an Exception: no caller may handle it or retry."""


Watch = Callable[[threading.Event], float | None]
"""Function that waits for a request to end the driver; returns the seconds left, or None once the event is set."""


class Ending:
    """State of this driver's early end: whether it was requested, and the deadline."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._changing = threading.Lock()
        self._stopped = False
        self._raised: set[type[BaseException]] = set()
        self._over = threading.Event()
        self._first_interrupt: float | None = None
        self._lease: Lease | None = None
        self._grace = GRACE
        self._run: RunContext | None = None
        self.confirm: Callable[[], None] = lambda: None
        """Confirms the end to the service that requested it. Must be called when the flow has ended."""

    def set_lease(self, lease: Lease, grace_period: float) -> None:
        """Set the lease and the grace period. Called when the driver has acquired the lease."""
        self._lease, self._grace = lease, grace_period

    def set_run(self, run: RunContext) -> None:
        """Set the run whose work must stop at the end. Called when the engines are up. Raises Preempted if the end was
        already requested."""
        self._run = run
        _reinstall_handlers()
        if self._begun.is_set():
            raise Preempted
        self.watch("drain-notices", partial(_drained, run))

    def watch(self, name: str, watch: Watch) -> None:
        """Run the watch in its own thread, and end the driver when it returns a number of seconds."""

        def listen() -> None:
            seconds = watch(self._over)
            if seconds is not None:
                self.begin(seconds)

        # Prefect's client finds its server in the context; without it, the client would start its own server.
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(listen,), name=name, daemon=True).start()

    def begin(self, limit: float = float("inf")) -> None:
        """Request the end, within the grace period and within `limit` seconds."""
        with self._changing:
            if self._begun.is_set():
                return
            self._begun.set()
        threading.Thread(target=self._end_in, args=(min(self._grace, limit),), name="grace", daemon=True).start()
        if self._run is not None:
            self.stop_work()

    def stop_work(self) -> None:
        """Let no further step begin, and abort running generations."""
        if self._run is not None and not self._run.stopping.is_set():
            self._run.stopping.set()
            threading.Thread(target=self._abort, args=(self._run,), name="stopping", daemon=True).start()

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Convert any exception of the block into Preempted if the end of the driver was requested.

        Before that, stops the work and makes a checkpoint.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception | KeyboardInterrupt):
                self._begun.wait(RELEASE_TIMEOUT)  # a handler was faster than the thread that receives the signal
            if isinstance(error, KeyboardInterrupt):
                self.stop_work()
            if not self._begun.is_set():
                raise
            self.stop_work()
            if self._run is not None and not self._stopped:
                self._stopped = True
                save(self._run)
            raise error if isinstance(error, Preempted) else Preempted() from error

    def process_signal(self, signum: int) -> None:
        """Process a signal. Called for each signal, in a separate thread."""
        signal.alarm(0)  # Ray's handler, which came before Python's, would abort the process after three seconds
        if self._begun.is_set():
            self._end_now()
        elif signum in NOTICES:
            self.begin()
        elif self._first_interrupt is None:
            self._first_interrupt = time.monotonic()
        elif time.monotonic() - self._first_interrupt > SAME_KEY:
            self._end_now()

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread: raise Preempted or KeyboardInterrupt, each once."""
        # The listener thread may not have processed an earlier notice yet.
        noticed = signum in NOTICES or Preempted in self._raised or self._begun.is_set()
        error = Preempted if noticed else KeyboardInterrupt
        if error not in self._raised:
            self._raised.add(error)
            raise error

    def finish(self) -> None:
        """Mark that the driver has ended in order."""
        self._over.set()

    def _abort(self, run: RunContext) -> None:
        while not self._over.is_set():
            for engine in run.fleet.rollout:
                with suppress(Exception):  # it may be dead, or have nothing to do
                    engine.abort()
            self._over.wait(ABORT_INTERVAL)

    def _end_in(self, seconds: float) -> None:
        if not self._over.wait(seconds):
            self._end_now()

    def _end_now(self) -> None:
        if self._over.is_set():
            return
        preempted = self._begun.is_set()
        outcome = Outcome.PREEMPTED if preempted else Outcome.STOPPED
        releasing = threading.Thread(target=self._release, args=(outcome,), daemon=True)
        releasing.start()
        releasing.join(RELEASE_TIMEOUT)
        word = "preempted" if preempted else "interrupted"
        print(f"{word}: ended at once; nothing committed is lost", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE if preempted else INTERRUPTED)

    def _release(self, outcome: Outcome) -> None:
        if self._lease is not None:
            with suppress(Exception):  # the run then looks like that of a killed driver
                self._lease.release(outcome)


@contextmanager
def ending_in_order() -> Iterator[Ending]:
    """Handle the signals that end a driver while the block runs.

    This includes signals that were ignored at the start, as in background jobs of a shell script. Only the main thread
    can handle signals.
    """
    ending = Ending()
    if threading.current_thread() is not threading.main_thread():
        yield ending
        return
    with ExitStack() as stack:
        stack.callback(ending.finish)
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        listener = threading.Thread(target=_listen, args=(receiver, ending), name="signals", daemon=True)
        listener.start()
        stack.callback(os.close, sender)  # ends the listener
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(sender, warn_on_full_buffer=False))
        for signum in (signal.SIGINT, *NOTICES):
            before = signal.getsignal(signum)
            # If Prefect has started the flow, its handler is installed, and knows more about the signal.
            if not callable(before) or before in (signal.default_int_handler, exit_preempted):
                stack.callback(signal.signal, signum, signal.signal(signum, ending.interrupt))
        yield ending


def _drained(run: RunContext, over: threading.Event) -> float | None:
    while not over.wait(DRAIN_INTERVAL):
        seconds = run.fleet.seconds_until_drained()
        if seconds is not None:
            run.emit(Message("Ray drains a machine of this run", "warning"))
            return seconds
    return None


def _reinstall_handlers() -> None:
    """Install Python's handlers again: Ray replaces them when a cluster starts."""
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, *NOTICES):
            handler = signal.getsignal(signum)
            if callable(handler):
                signal.signal(signum, handler)


def _listen(receiver: int, ending: Ending) -> None:
    with open(receiver, "rb", buffering=0) as signals:
        while received := signals.read(1):
            if received[0] in (signal.SIGINT, *NOTICES):
                ending.process_signal(received[0])


def save(run: RunContext) -> Commit | None:
    """Make a restore point of the newest weights, so that the next driver need not replay.

    Returns None where one exists already, where the training engine does not hold these weights, or after an error.
    """
    newest = run.ledger.last_iteration()
    places = [] if newest is None else range(newest, newest - 2 - run.ledger.lag, -1)
    index = next((i for i in places if i >= run.ledger.first_iteration and run.find(i, Step.TRAIN)), None)
    if index is None or run.find(index, Step.CHECKPOINT) is not None:
        return None
    trained = run.committed(index, Step.TRAIN)
    try:
        with run.weights_lock:
            position = run.fleet.training.position()
            if (position.weight_version, position.state_digest) != (trained.weight_version_out, trained.state_digest):
                return None
            saved = checkpoint(run, index, None, trained, last_selection(run, index))
    except Exception as error:  # the next driver replays instead
        run.emit(Message(f"No checkpoint could be made: {error}", "warning"))
        return None
    run.emit(Message(f"The weights of iteration {index} are saved"))
    return saved


OnLease = Callable[[Lease, float], None]
"""Function that receives the lease when the driver has acquired it, and the grace period in seconds."""
