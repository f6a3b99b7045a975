"""Tool processes: a small pool that runs plain functions, one call at a time per process.

| event of a call | result |
|---|---|
| it returns or raises | that is its result |
| it exceeds its timeout | `ToolFailed`; the process and all its descendants are killed |
| it exceeds its memory limit | `ToolFailed`; the process is replaced |
| it ends its process: an exit code, a signal such as SIGSEGV | `ToolFailed`; the process is replaced |
| it leaves child processes | its result; they are killed, with the process |
| its process is killed from outside: SIGKILL as by the OOM killer, SIGTERM | a pure tool is called again, up to \
`LOST` times in total, then `ToolUnavailable`; another is `ToolLost` |
| its module cannot be loaded in the process, or the process cannot be isolated from the network | `ToolUnavailable` |

The timeout of a call begins when its process has loaded the tool. Waiting for a free process does not count, neither
for the call nor for its episode (`waiting`). Processes start on demand, each as a fresh Python, and are reused for the
calls of all tools.

As many quick calls run at a time as there are cores, at most `PROCESSES`. For each call that waits for something or
hangs, another process is started on demand, up to `MOST`, while memory is available. Calls that compute for long allow
another process, too, up to the same number again: more would slow each other beyond their timeouts. Waiting calls take
turns (`Turns`). An episode uses at most as many processes as quick calls may, and a tool leaves some to other tools.
"""

import asyncio
import enum
import json
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Generic, Protocol, TypeVar

import psutil

from cairn.engines.agents.tools.errors import Reason, ToolFailed, ToolLost, ToolUnavailable
from cairn.engines.processes.child import Child
from cairn.storage.store.canonical import from_json

# Order of waiting calls: round robin over tools, then over a tool's episodes; an episode's oldest call is first.


One = TypeVar("One")


class Turns(Generic[One]):
    """Waiting items, each of a tool and an episode."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, deque[One]]] = {}
        """Items by tool and episode, both in the order of their turns."""

    def add(self, tool: str, episode: str, one: One) -> None:
        """Add an item behind all others of the episode."""
        self._waiting.setdefault(tool, {}).setdefault(episode, deque()).append(one)

    def take(self, may: Callable[[str, str], bool]) -> One | None:
        """Remove and return the next item of a tool and an episode that `may` allows; None where there is none."""
        for tool, episodes in self._waiting.items():
            for episode, calls in episodes.items():
                if may(tool, episode):
                    del self._waiting[tool], episodes[episode]
                    taken = calls.popleft()
                    if calls:
                        episodes[episode] = calls
                    if episodes:
                        self._waiting[tool] = episodes
                    return taken
        return None


# Plain functions that cannot leave the process of their episode, such as bound methods: each call runs in a thread.
#
# A thread cannot be killed: a late one keeps running, and its result is discarded. At `MOST_LATE` late threads no call
# is made until one of them has ended.


MOST_LATE = 64
"""Maximum number of threads that run past their timeout."""

in_turn: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("in_turn", default=nullcontext)
"""Called at the start of a call; the call's thread enters the context manager that it returns."""

_late: set[threading.Thread] = set()


async def in_a_thread(function: Callable[[], Any], timeout: float) -> Any:
    """Run `function` in a thread. Raises its errors, TimeoutError, and ToolUnavailable where too many threads are
    late."""
    _late.difference_update([thread for thread in _late if not thread.is_alive()])
    if len(_late) >= MOST_LATE:
        raise ToolUnavailable(
            f"{MOST_LATE} tool calls still run in threads after their deadlines and cannot be ended: make the tools "
            "functions of a module or coroutine functions"
        )
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((result, error))

    turn = in_turn.get()()

    def run() -> None:
        result, error = None, None
        try:
            with turn:
                result = function()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    thread = threading.Thread(target=run, name="tool", daemon=True)
    thread.start()
    try:
        async with asyncio.timeout(timeout):
            result, error = await future
    except (TimeoutError, asyncio.CancelledError):
        _late.add(thread)
        raise
    if error is not None:
        raise error
    return result


MEMORY = 2 * 1024**3
"""Default limit of a call's data in bytes."""
PROCESSES = 4
"""Maximum number of processes for quick calls."""
MOST = 32
"""Maximum number of processes in total."""
SLOW = 0.1
"""Seconds after which a call that waits for something is not quick."""
SLOW_COMPUTING = 0.8
"""Seconds after which a call that computes is not quick."""
SLOW_TO_LOAD = 10.0
"""Seconds after which a call whose process starts or loads the tool is not quick."""
SPARE_MEMORY = 2**30
"""Bytes of memory that must be available to start another process."""
IDLE = 30.0
"""Seconds without a call after which a process ends, where there are more than `PROCESSES`."""
LOST = 3
"""Number of processes that may be killed from outside during a call of a pure tool."""
START_TIMEOUT = 120.0
"""Seconds that a process may take to start and to load a tool."""

_network = threading.Event()
"""Set if tools may use the network."""

_TICK = 0.25


waiting: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("waiting", default=nullcontext)
"""Context manager that is entered while a call waits for a process."""


class Pace(enum.Enum):
    """Pace of a running call."""

    QUICK = "quick"
    """Quick so far."""
    WAITS = "waits"
    """The call waits for something else than the machine's cores."""
    COMPUTES = "computes"
    """The call has been computing for long."""


SetPace = Callable[[Pace], None]


class Callee(Protocol):
    """The interface of a tool that tool processes use: `cairn.engines.agents.tools.tool.Tool`."""

    name: str
    timeout: float
    """Maximum seconds of a call."""
    memory: int | None
    """Maximum bytes of data of the process during a call."""
    max_output: int
    """Maximum characters of a result."""

    @property
    def kind(self) -> str:
        """Kind of the tool, which decides what a lost call means: `pure`, …"""

    def late(self) -> ToolFailed:
        """Return the failure of a call that exceeded its timeout."""


class _Call:
    """A call that is waiting or running."""

    def __init__(self, tool: Callee, path: str, message: bytes, episode: str) -> None:
        self.tool, self.path, self.message, self.episode = tool, path, message, episode
        self.pace = Pace.QUICK
        self.abandoned = threading.Event()
        self.begun: Future[None] = Future()
        """Done when a process has started the call, or the call was abandoned."""
        self.answer: Future[Any] = Future()
        for future in (self.begun, self.answer):
            future.set_running_or_notify_cancel()

    def make(self, process: "_Process", pace: SetPace) -> Callable[[], None]:
        """Make the call in the process. Return a function that delivers the result. `pace` receives the call's pace."""
        if self.abandoned.is_set():
            return self._begin
        try:
            return partial(self.answer.set_result, self._made(process, pace))
        except BaseException as error:
            return partial(self.answer.set_exception, error)
        finally:
            self._begin()

    def _made(self, process: "_Process", pace: SetPace) -> Any:
        for _ in range(LOST):
            try:
                child = process.ready(self.tool, self.path, pace)
                self._begin()
                return process.call(child, self.tool, self.message, self.abandoned, pace)
            except ToolLost:
                if self.tool.kind != "pure":
                    raise
        raise ToolUnavailable(
            f"{self.tool.name}: its process was ended from outside {LOST} times: does it have enough memory?"
        )

    def _begin(self) -> None:
        if not self.begun.done():
            self.begun.set_result(None)


class ToolProcesses:
    """The pool of processes; thread-safe, and bound to no loop."""

    def __init__(self, count: int, most: int = MOST) -> None:
        """Create a pool of `count` processes for quick calls, and `most` in total."""
        self._count, self._most = count, max(count, most)
        self._most_computing = max(2 * count, (os.cpu_count() or 1) // 2)
        self._lock = threading.Lock()
        self._waiting: Turns[_Call] = Turns()
        self._at_work: dict[_Slot, _Call] = {}
        self._idle: list[_Slot] = []

    async def call(self, tool: Callee, path: str, arguments: Mapping[str, Any], key: str) -> Any:
        """Call a tool; return its result. Raises ToolFailed, ToolUnavailable and ToolLost, see the module.

        Args:
            path: path of the tool's function, for `load_callable`.
            key: key of the call; without its last component it names the episode.
        """
        message = {
            "name": tool.name,
            "arguments": dict(arguments),
            "key": key,
            "memory": tool.memory or MEMORY,
            "max_output": tool.max_output,
        }
        call = _Call(tool, path, json.dumps(message).encode(), key.rpartition("/")[0])
        with self._lock:
            self._waiting.add(tool.name, call.episode, call)
            self._dispatch()
        try:
            with waiting.get()():
                await asyncio.wrap_future(call.begun)
            return await asyncio.wrap_future(call.answer)
        finally:
            call.abandoned.set()

    def done(self, slot: "_Slot") -> None:
        """Mark a slot as free for another call."""
        with self._lock:
            del self._at_work[slot]
            self._idle.append(slot)
            self._dispatch()

    def pace(self, slot: "_Slot", pace: Pace) -> None:
        """Set the pace of a slot's call."""
        with self._lock:
            self._at_work[slot].pace = pace
            self._dispatch()

    def release(self, slot: "_Slot") -> bool:
        """Return whether an idle slot is surplus; it is then removed from the pool."""
        with self._lock:
            if slot not in self._idle or len(self._idle) + len(self._at_work) <= self._count:
                return False
            self._idle.remove(slot)
            return True

    def _dispatch(self) -> None:
        """Assign waiting calls to free processes, or to new ones where these are allowed."""
        while self._has_room():
            call = self._waiting.take(self._may)
            if call is None:
                return
            slot = self._idle.pop() if self._idle else _Slot(self)
            self._at_work[slot] = call
            slot.calls.put(call)

    def _has_room(self) -> bool:
        paces = Counter(call.pace for call in self._at_work.values())
        quick, there = paces[Pace.QUICK], len(self._at_work)
        if quick >= self._count or quick + paces[Pace.COMPUTES] >= self._most_computing:
            return False
        if self._idle or there < self._count:
            return True
        return there < self._most and psutil.virtual_memory().available > SPARE_MEMORY

    def _may(self, tool: str, episode: str) -> bool:
        at_work = self._at_work.values()
        of_tool = [call.pace for call in at_work if call.tool.name == tool]
        return (
            sum(call.episode == episode for call in at_work) < self._count
            and len(of_tool) < max(self._count, self._most - self._count)
            and len(of_tool) - of_tool.count(Pace.WAITS) < self._most_computing - 1
        )


class _Slot:
    """A process, and the thread that starts and reads it: the kernel kills the process when that thread ends."""

    def __init__(self, pool: ToolProcesses) -> None:
        self.calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._pool = pool
        self._process = _Process()
        threading.Thread(target=self._run, name="tool-process", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                call = self.calls.get(timeout=IDLE)
            except queue.Empty:
                if self._pool.release(self):
                    self._process.kill()
                    return
                continue
            deliver = call.make(self._process, partial(self._pool.pace, self))
            self._pool.done(self)  # before delivery, so that the caller's next call finds a free slot
            deliver()
            del call, deliver  # the result may be large


def allow_network(granted: bool) -> None:
    """Set whether processes that start from now on may use the network; the default is no."""
    _network.set() if granted else _network.clear()


@cache
def processes() -> ToolProcesses:
    """Return the pool of this process."""
    return ToolProcesses(min(PROCESSES, os.cpu_count() or 1))


class _Process:
    """A child process that starts on first use, and again after it has ended."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._loaded: str | None = None

    def call(
        self,
        child: Child,
        tool: Callee,
        message: bytes,
        abandoned: threading.Event,
        pace: SetPace,
    ) -> Any:
        """Return the result of a call in the process of `ready`. `pace` receives the call's pace.

        Raises ToolFailed, ToolUnavailable and ToolLost.
        """
        try:
            child.connection.send_bytes(message)
            if not self._wait(child, tool.timeout, abandoned, pace):
                self.kill()
                raise tool.late()
            answer = from_json(child.connection.recv_bytes(_longest(tool.max_output)))
        except (EOFError, OSError):
            raise self._ended(tool, child) from None
        if answer["spoilt"]:
            self.kill()
        if "failed" in answer:
            raise ToolFailed(answer["failed"], Reason(answer["reason"]))
        if "unavailable" in answer:
            raise ToolUnavailable(answer["unavailable"])
        return answer["result"]

    def kill(self) -> int:
        """Kill the process and its descendants. Return its exit code, 0 where there is no process."""
        child, self._child, self._loaded = self._child, None, None
        return 0 if child is None else child.kill()

    def ready(self, tool: Callee, path: str, pace: SetPace) -> Child:
        """Return a process that has loaded the tool. `pace` receives the call's pace.

        Raises ToolUnavailable.
        """
        if self._child is not None and self._child.has_ended:
            self.kill()  # it ended while it was idle
        for _ in range(LOST):
            if self._child is None:
                self._child = Child("cairn.engines.agents.tools.worker", [_network.is_set()], adopts_orphans=True)
            child = self._child
            if self._loaded == path:
                return child
            connection = child.connection
            try:
                connection.send_bytes(json.dumps({"path": path}).encode())
                if not connection.poll(SLOW_TO_LOAD):
                    pace(Pace.WAITS)
                if connection.poll(START_TIMEOUT - SLOW_TO_LOAD):
                    answer = from_json(connection.recv_bytes())
                    if not answer["loaded"]:
                        raise ToolUnavailable(f"{tool.name}: its process cannot load it: {answer['why']}")
                    self._loaded = path
                    return child
            except (EOFError, OSError):
                pass
            self.kill()
        raise ToolUnavailable(f"{tool.name}: its process ended, or did not start, while it loaded {path}, {LOST} times")

    def _wait(self, child: Child, seconds: float, abandoned: threading.Event, pace: SetPace) -> bool:
        """Return whether a message arrives in time."""
        began, look = time.monotonic(), SLOW
        end = began + seconds
        pace(Pace.QUICK)
        while not child.connection.poll(
            max(0.0, min(_TICK, look - (time.monotonic() - began), end - time.monotonic()))
        ):
            if time.monotonic() - began >= look:
                computes = _computes(child.pid)
                pace(Pace.WAITS if not computes else Pace.COMPUTES if look >= SLOW_COMPUTING else Pace.QUICK)
                look *= 2  # a check costs time
            if child.is_gone:
                raise EOFError
            if abandoned.is_set() or time.monotonic() >= end:
                return False
        return True

    def _ended(self, tool: Callee, child: Child) -> Exception:
        """Return the error for a process that ended or closed its connection."""
        ended = child.wait()
        self.kill()
        if ended.hung_up:
            return ToolFailed(f"{tool.name}: it closed the connection of its process", Reason.DIED)
        if ended.signal is None:
            return ToolFailed(f"{tool.name}: it ended its process, with exit code {ended.code}", Reason.DIED)
        if ended.from_outside:
            return ToolLost(f"{tool.name}: its process was ended from outside ({ended.signal}) while it was at work")
        return ToolFailed(f"{tool.name}: it ended its process, with {ended.signal}", Reason.DIED)


def _computes(pid: int) -> bool:
    """Return whether a process or a descendant is running on, or waiting for, a core."""
    with suppress(psutil.NoSuchProcess):
        head = psutil.Process(pid)
        if head.status() == psutil.STATUS_RUNNING:
            return True
        for child in head.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.status() == psutil.STATUS_RUNNING:
                    return True
    return False


def _longest(max_output: int) -> int:
    """Return the maximum size of a response in bytes: JSON writes a character in at most twelve."""
    return 12 * max_output + 2**16
