"""Keepers of samples (`cairn.engines.types.keeping`) of a rollout engine: in its actor, and as the driver calls them.

Keepers whose users come while the engine works for others wait, and then go to the engine in one call:

    driver      a ─▶ call 1 [a]      b, c, d wait    ─▶ call 2 [b, c, d]
    actor            a: make, generate, finish          b: make, generate ┌ finish
                                                        c:          make  └ generate ┌ finish
                                                        d:                     make  └ generate, finish

So keepers that come at once take two calls, however many they are. A keeper that comes to an idle engine does not wait
for others. The engine generates for one of them at a time. What fails in one of them ends that one. The loss of the
engine ends all of the call, and those that wait: their users have to check the engine again.
"""

import pickle
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout, is_device_failure
from cairn.engines.types.keeping import Finished, Keeper, SampleSource, closed_in_the_end

Make = Callable[[], Keeper]
"""Function that makes a keeper in the engine's process."""
Messages = list[tuple[int, Any]]
"""Messages of keepers, each with the place of its keeper in the call."""
ABORT_INTERVAL = 0.5
"""Seconds after which keepers that are to end are aborted again: they may not have begun to generate before."""


@dataclass(frozen=True)
class Failed:
    """Last message of a keeper that failed."""

    error: BaseException
    trace: str
    """Traceback where it failed."""

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        """Return the message for an error, with a copy of it that another process can read."""
        try:
            own = pickle.loads(pickle.dumps(error))
        except Exception:  # whatever a class of errors does when it is read
            own = EngineError(f"{type(error).__name__}: {error}")
        return cls(own, "".join(traceback.format_exception(error)))


class Keepers:
    """Keepers of samples in this process. Methods may be called from any thread."""

    def __init__(self, engine: SampleSource, usage: Callable[[], Mapping[str, int]]) -> None:
        """`usage`: returns the engine's usage counters."""
        self._source, self._usage = engine, usage
        self._keeping: set[_Keeping] = set()

    def keep(self, makes: Sequence[Make]) -> Iterator[Messages]:
        """Make keepers and have them generate, one after the other. Yield their messages, of each Finished or Failed
        last. Closing the iterator ends the generation. Raises what the engine was lost by, without a last message of
        those that it ended."""
        call = _Keeping(self._source, self._usage, makes)
        self._keeping.add(call)
        try:
            yield from call.messages()
        finally:
            call.end()
            self._keeping.discard(call)

    def stop_keepers(self) -> None:
        """Let no further keeper of the running calls generate."""
        for call in list(self._keeping):
            call.stop()

    def close_keepers(self) -> None:
        """End all keepers: those of a driver that was replaced. Return when what they took is durable."""
        for call in list(self._keeping):
            call.end()


class _Keeping:
    """One call: its keepers generate in one thread, and are made and finished in others."""

    def __init__(self, engine: SampleSource, usage: Callable[[], Mapping[str, int]], makes: Sequence[Make]) -> None:
        self._engine, self._usage, self._makes = engine, usage, makes
        self._messages: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._ending = threading.Event()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="keepers", daemon=True).start()

    def messages(self) -> Iterator[Messages]:
        """Yield what has come in since, and wait for the first one."""
        while (message := self._messages.get()) is not None:
            messages = [message]
            with suppress(Empty):
                while (message := self._messages.get_nowait()) is not None:
                    messages.append(message)
            yield messages
            if message is None:
                break
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Let no further keeper generate."""
        self._ending.set()

    def end(self) -> None:
        """Return when all keepers have ended, soon."""
        self.stop()
        while not self._ended.is_set():
            self._engine.abort()
            self._ended.wait(ABORT_INTERVAL)

    def _run(self) -> None:
        try:
            with ThreadPoolExecutor(2, "keeping") as pool:
                makes = enumerate(self._makes)
                ahead = deque((place, pool.submit(make)) for place, make in islice(makes, 1))
                while ahead:
                    if not self._ending.is_set():
                        ahead.extend((place, pool.submit(make)) for place, make in islice(makes, 1))
                    self._generate(*ahead.popleft(), pool)  # what is generated is in memory until it is finished
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()
            self._messages.put(None)

    def _generate(self, place: int, making: "Future[Keeper]", pool: ThreadPoolExecutor) -> None:
        """Have a keeper generate, and then `pool` finish it."""
        try:
            keeper = making.result()
            try:
                if self._ending.is_set():
                    raise EngineError("the engine was stopped before it came to these samples")
                for message in keeper.generate(self._engine):
                    self._messages.put((place, message))
                usage = self._usage()
            except BaseException as error:
                with closed_in_the_end(keeper):
                    raise error
        except Exception as error:
            if is_device_failure(error) or isinstance(error, EngineDied | EngineTimeout):
                self._error = error  # of the whole call
                self.stop()
            if self._error is None:
                self._messages.put((place, Failed.of(error)))
        else:
            pool.submit(self._finish, place, keeper, usage)

    def _finish(self, place: int, keeper: Keeper, usage: Mapping[str, int]) -> None:
        try:
            with closed_in_the_end(keeper):
                result = keeper.finish()
        except Exception as error:
            self._messages.put((place, Failed.of(error)))
        else:
            self._messages.put((place, Finished(result, usage)))


@dataclass(frozen=True)
class _Asked:
    """A keeper that is asked for, with its messages."""

    make: Make
    messages: SimpleQueue[Any] = field(default_factory=SimpleQueue)


class Gathered:
    """The keepers of one engine, as the driver calls them. Threads may share it."""

    def __init__(self, call: Callable[[Sequence[Make]], Iterator[Messages]]) -> None:
        """`call`: calls `Keepers.keep`. One call is made at a time, in a thread of its own."""
        self._call = call
        self._lock = threading.Lock()
        self._waiting: list[_Asked] = []
        self._calling = False

    def keep(self, make: Make) -> Generator[Any, None, None]:
        """Yield the messages of a keeper, Finished last. Raises what ended it. A keeper whose reader is gone goes on:
        what it takes is durable."""
        asked = _Asked(make)
        with self._lock:
            self._waiting.append(asked)
            if not self._calling:
                self._calling = True
                threading.Thread(target=self._call_until_none_waits, name="keepers", daemon=True).start()
        while True:
            message = asked.messages.get()
            if isinstance(message, Failed):
                raise message.error from EngineError(message.trace)
            yield message
            if isinstance(message, Finished):
                return

    def _call_until_none_waits(self) -> None:
        while True:
            with self._lock:
                asked, self._waiting = self._waiting, []
                self._calling = bool(asked)
            if not asked:
                return
            failed: BaseException = EngineError("the engine did not finish the samples")
            try:
                for messages in self._call([one.make for one in asked]):
                    for place, message in messages:
                        asked[place].messages.put(message)
            except BaseException as error:  # a reader waits for each
                failed = error
                with self._lock:
                    asked, self._waiting = [*asked, *self._waiting], []
            for one in asked:
                one.messages.put(Failed.of(failed))  # which nobody reads where it has ended
