"""Timeouts of user code: a sample that waits too long fails alone; one that blocks the others ends the process.

A thread of the process checks this. Code that holds the interpreter's lock stops that thread too; the parent detects it
from the heartbeat."""

import asyncio
import mmap
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

import psutil

from cairn.engines.agents.episodes.recorder import sample_in
from cairn.engines.agents.episodes.runner import Runner
from cairn.engines.types.trajectories import SampleKey, SampleRequest
from cairn.storage.store.errors import naming_full

# Heartbeat of the process of user code, in memory that its parent reads. Code that holds the interpreter's lock stops
# every thread of its process, so only another process can notice it.
#
# | memory | content |
# |---|---|
# | the beat | when a thread of the process last ran; 0 while no call is running |
# | a slot | the thread that is running a sample's code, the sample, and the start time; free slots are 0 |
#
# The samples' loop has the first slot (`TurnLoop`). Each thread that runs a tool or a function for a sample takes
# another one.


Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

_BEAT = struct.Struct("=d")
_SLOT = struct.Struct("=qqqd")
_SLOTS = 128
_SIZE = _BEAT.size + _SLOTS * _SLOT.size
_LOOP = 0
_COMPUTES = 0.3
"""Seconds over which the CPU time of threads is measured."""


class Heartbeat:
    """The shared memory, in either process."""

    def __init__(self, fd: int) -> None:
        """Map the memory of the file descriptor `fd`, which may be closed afterwards."""
        self._memory = mmap.mmap(fd, _SIZE)
        self._lock = threading.Lock()
        self._free = list(range(_SLOTS - 1, _LOOP, -1))

    @classmethod
    @contextmanager
    def shared(cls) -> Iterator[tuple["Heartbeat", int]]:
        """Create the memory in the parent; yield it and its descriptor for the child.

        Raises NoSpace where temporary files have no space: with a sparse file, writing to it later would kill either
        process by a signal.
        """
        with tempfile.TemporaryFile() as file:
            with naming_full(tempfile.gettempdir()):
                file.write(bytes(_SIZE))
                file.flush()
            yield cls(file.fileno()), file.fileno()

    def beat(self) -> None:
        """Record that a thread is running."""
        _BEAT.pack_into(self._memory, 0, time.monotonic())

    def rest(self) -> None:
        """Record that no call is running."""
        _BEAT.pack_into(self._memory, 0, 0.0)

    @property
    def last(self) -> float:
        """Time of the last beat."""
        return float(_BEAT.unpack_from(self._memory)[0])

    def take_turn(self, key: SampleKey, slot: int = _LOOP) -> None:
        """Record that this thread runs code of a sample."""
        _SLOT.pack_into(self._memory, _offset(slot), threading.get_native_id(), *key, time.monotonic())

    def end_turn(self, slot: int = _LOOP) -> None:
        """Free this thread's slot."""
        _SLOT.pack_into(self._memory, _offset(slot), 0, 0, 0, 0.0)

    def of_a_thread(self) -> AbstractContextManager[None]:
        """Return a context manager for a thread that runs code for the current sample."""
        return self._turn_of(sample_in(copy_context()))

    @contextmanager
    def _turn_of(self, key: SampleKey | None) -> Iterator[None]:
        with self._lock:
            slot = self._free.pop() if self._free and key is not None else None
        if slot is None or key is None:
            yield
            return
        self.take_turn(key, slot)
        try:
            yield
        finally:
            self.end_turn(slot)
            with self._lock:
                self._free.append(slot)

    def holder(self, pid: int) -> SampleKey | None:
        """Return the sample whose code blocks all threads of the process; None where it is unknown. Called in the
        parent.

        A thread that waits for the lock uses no CPU time.
        """
        slots = (_SLOT.unpack_from(self._memory, _offset(slot)) for slot in range(_SLOTS))
        turns = {thread: (group, index) for thread, group, index, _ in slots if thread}
        computing = _computing(pid)
        if computing is not None:
            return turns.get(computing)
        return next(iter(turns.values())) if len(turns) == 1 else None


class TurnLoop(asyncio.SelectorEventLoop):
    """An event loop that records whose code it runs, according to the contexts of callbacks."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        super().__init__()
        self._heartbeat = heartbeat

    def call_soon(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback like the base class; the heartbeat shows its sample while it runs."""
        context = copy_context() if context is None else context  # an empty one is false
        return super().call_soon(self._in_turn(partial(callback, *args), context), context=context)

    def call_at(
        self, when: float, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback like the base class; the heartbeat shows its sample while it runs."""
        context = copy_context() if context is None else context  # an empty one is false
        return super().call_at(when, self._in_turn(partial(callback, *args), context), context=context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], Result], *args: *Arguments
    ) -> "asyncio.Future[Result]":
        """Run a function like the base class; in a thread, the heartbeat shows its sample while it runs."""
        if executor is not None and not isinstance(executor, ThreadPoolExecutor):  # processes hold no lock of this one
            return super().run_in_executor(executor, func, *args)
        turn = self._heartbeat.of_a_thread()

        def call() -> Result:
            with turn:
                return func(*args)

        return super().run_in_executor(executor, call)

    def _in_turn(self, callback: Callable[[], object], context: Context) -> Callable[[], object]:
        key = sample_in(context)
        return callback if key is None else partial(self._take_turn, key, callback)

    def _take_turn(self, key: SampleKey, callback: Callable[[], object]) -> None:
        self._heartbeat.take_turn(key)
        try:
            callback()
        finally:
            self._heartbeat.end_turn()


class Watch:
    """A thread of the parent that checks the heartbeat while a call is running."""

    def __init__(self, heartbeat: Heartbeat, pid: int, seconds: float, blocked: Callable[[SampleKey | None], None]):
        """Create the thread.

        Args:
            seconds: time without a beat after which the process counts as blocked.
            blocked_message: called once, with the sample that blocks the process.
        """
        self._heartbeat, self._pid, self._seconds, self._blocked = heartbeat, pid, seconds, blocked
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="user-code-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        tick = min(1.0, self._seconds / 4)
        last, silent = 0.0, 0.0
        while not self._over.wait(tick):  # ticks are counted: where this process is stopped, too, none pass
            beat = self._heartbeat.last
            if not beat or beat != last or _is_stopped(self._pid):
                last, silent = beat, 0.0
                continue
            silent += tick
            if silent > self._seconds + tick:
                self._blocked(self._heartbeat.holder(self._pid))
                return


def _offset(slot: int) -> int:
    return _BEAT.size + slot * _SLOT.size


def _is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def _computing(pid: int) -> int | None:
    """Return the thread of a process that uses most CPU time; None where none uses any, or it is unknown."""
    try:
        process = psutil.Process(pid)
        before = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
        time.sleep(_COMPUTES)
        spent = {t.id: t.user_time + t.system_time - before.get(t.id, 0.0) for t in process.threads()}
    except psutil.Error:
        return None
    most = max(spent, key=lambda thread: spent[thread], default=None)
    return most if most is not None and spent[most] > 0 else None


TICK = 1.0
"""Maximum seconds between two checks."""


class Watchdog:
    """The timeouts of the samples of a call, while it runs; a context manager in the thread of their loop.

    Args:
        seconds: maximum time of a sample from its start, or the engine's last response, to its next request or its end.
            Time that it waits for resources that others hold is not counted.
        in_all: maximum time of a sample from start to end; None is unlimited.
        hung: called with the sample whose code blocks the loop, None where it is unknown, and a message.
        heartbeat: beats while the context is open.
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
        """Time of the loop's last turn."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._tick = min(TICK, seconds / 4, (in_all or seconds) / 4)

    def __enter__(self) -> "Watchdog":
        self._check()
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._next.cancel()
        self._thread.join()
        if self._heartbeat is not None:
            self._heartbeat.rest()

    def restart(self, key: SampleKey) -> None:
        """Restart the timeout of a sample that received a response."""
        self._since[key] = self._now(key)

    def _check(self) -> None:
        """Check the timeouts, on the loop."""
        self._turned = now = time.monotonic()
        for key in self._runner.working:
            if self._now(key) - self._since[key] > self._seconds:
                late = f"it took longer than {self._seconds:g} s outside the engine"
                self._runner.give_up(key, f"generate: GenerateTimeout: {late}")
        if self._in_all is not None and now - self._began > self._in_all:  # all of them have begun with it
            for key in self._runner.unfinished:
                self._runner.give_up(key, f"generate: EpisodeTimeout: it took longer than {self._in_all:g} s in all")
        self._next = self._loop.call_later(self._tick, self._check)

    def _now(self, key: SampleKey) -> float:
        """Return the time of a sample's clock, which stops while the sample waits for resources that others hold."""
        return time.monotonic() - self._runner.waits.seconds(key)

    def _watch(self) -> None:
        """Check in a thread whether a sample blocks the loop."""
        while not self._over.wait(self._tick):
            self._beat()
            if time.monotonic() - self._turned > self._seconds + self._tick:
                self._hung((self._runner.current(), blocked_message(self._seconds)))
                return

    def _beat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat()


def blocked_message(seconds: float) -> str:
    """Return the error of a sample that blocked all others."""
    blocked = f"it blocked all other samples for longer than {seconds:g} s"
    return f"generate: LoopBlocked: {blocked}: await slow calls in it"
