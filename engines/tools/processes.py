"""Tool processes: a few, which call plain functions, one call at a time each.

| what happens to a call | what becomes of it |
|---|---|
| it returns or raises | that is its answer |
| it is not done at its deadline | `ToolFailed`; the process and all that it started are killed |
| it wants more memory than it may have | `ToolFailed`; the process is replaced |
| it ends its process: an exit code, a signal such as SIGSEGV | `ToolFailed`; the process is replaced |
| it leaves processes behind | its answer; they are killed, with the process |
| its process is ended from outside: SIGKILL as by the OOM killer, SIGTERM | a pure tool is called again, up to `LOST` \
times in all, then it is `ToolUnavailable`; another is `ToolLost` |
| its module cannot be loaded in the process | `ToolUnavailable` |

The time of a call begins when its process has the tool loaded, and is not counted while it waits for a free one.
Processes are started when they are needed, each fresh from Python, and stay for the calls of all tools.
"""

import asyncio
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from cairn.engines.child import FROM_OUTSIDE, has_ended, kill_family, launch
from cairn.engines.tools.errors import Reason, ToolFailed, ToolLost, ToolUnavailable

if TYPE_CHECKING:
    from cairn.engines.tools.tool import Tool

MEMORY = 2 * 1024**3
"""Bytes of data that a call may hold where its tool does not say."""
PROCESSES = 4
"""At most."""
LOST = 3
"""Processes that may be ended from outside over a call of a pure tool."""
START_TIMEOUT = 120.0
"""Seconds that a process may take to start and to load a tool."""

_TICK = 0.25
_TO_END = 10.0


class ToolProcesses:
    """`count` processes at most. Thread-safe, and of no loop."""

    def __init__(self, count: int) -> None:
        # The kernel ties a process to the thread that starts it: these threads live as long as this.
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tool-process")
        self._free: queue.LifoQueue[_Process] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(_Process())

    async def call(self, tool: "Tool", path: str, arguments: Mapping[str, Any], key: str) -> Any:
        """The result of a call, see the module. `path`: where the tool's function is, for `load_callable`."""
        message = {
            "name": tool.name,
            "arguments": dict(arguments),
            "key": key,
            "memory": tool.memory or MEMORY,
            "max_output": tool.max_output,
        }
        given_up = threading.Event()
        future = self._threads.submit(self._call, tool, path, json.dumps(message).encode(), given_up)
        try:
            return await asyncio.wrap_future(future)
        finally:
            given_up.set()

    def close(self) -> None:
        """End the processes, when their calls are done."""
        self._threads.shutdown(cancel_futures=True)
        while not self._free.empty():
            self._free.get().kill()

    def _call(self, tool: "Tool", path: str, message: bytes, given_up: threading.Event) -> Any:
        process = self._free.get()
        try:
            for _ in range(LOST):
                try:
                    return process.call(tool, path, message, given_up)
                except ToolLost:
                    if tool.kind != "pure":
                        raise
            raise ToolUnavailable(
                f"{tool.name}: its process was ended from outside {LOST} times: has it memory enough?"
            )
        finally:
            self._free.put(process)


@cache
def processes() -> ToolProcesses:
    """Those of this process."""
    return ToolProcesses(min(PROCESSES, os.cpu_count() or 1))


class _Process:
    """Started when it is first needed, and again after it ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._loaded: str | None = None

    def call(self, tool: "Tool", path: str, message: bytes, given_up: threading.Event) -> Any:
        """Raises ToolFailed, ToolUnavailable and ToolLost."""
        connection = self._ready(tool, path)
        try:
            connection.send_bytes(message)
            if not self._wait(connection, tool.timeout, given_up):
                self.kill()
                raise tool.late()
            answer = json.loads(connection.recv_bytes(_longest(tool.max_output)))
        except (EOFError, OSError):
            raise self._ended(tool) from None
        if answer["spoilt"]:
            self.kill()
        if "failed" in answer:
            raise ToolFailed(answer["failed"], Reason(answer["reason"]))
        if "unavailable" in answer:
            raise ToolUnavailable(answer["unavailable"])
        return answer["result"]

    def kill(self) -> int:
        """End the process and what it started; returns its exit code, 0 if there is none."""
        if self._process is None or self._connection is None:
            return 0
        self._connection.close()
        kill_family(self._process)
        code = self._process.wait()
        self._process = self._connection = self._loaded = None
        return code

    def _ready(self, tool: "Tool", path: str) -> Connection:
        if self._process is not None and has_ended(self._process):
            self.kill()  # it was ended while it had nothing to do
        for _ in range(LOST):
            connection = self._connection or self._launch()
            if self._loaded == path:
                return connection
            try:
                connection.send_bytes(json.dumps({"path": path}).encode())
                if connection.poll(START_TIMEOUT):
                    answer = json.loads(connection.recv_bytes())
                    if not answer["loaded"]:
                        raise ToolUnavailable(f"{tool.name}: its process cannot load it: {answer['why']}")
                    self._loaded = path
                    return connection
            except (EOFError, OSError):
                pass
            self.kill()
        raise ToolUnavailable(f"{tool.name}: its process ended, or did not start, while it loaded {path}, {LOST} times")

    def _launch(self) -> Connection:
        here, there = Pipe()
        with there:
            self._process = launch("cairn.engines.tools.worker", there, ())
        self._connection = here
        return here

    def _wait(self, connection: Connection, seconds: float, given_up: threading.Event) -> bool:
        """Whether there is something to be received in time."""
        end = time.monotonic() + seconds
        while not connection.poll(max(0.0, min(_TICK, end - time.monotonic()))):
            assert self._process is not None
            if has_ended(self._process) and not connection.poll():  # what it started holds the connection open
                raise EOFError
            if given_up.is_set() or time.monotonic() >= end:
                return False
        return True

    def _ended(self, tool: "Tool") -> Exception:
        """Why it did, or closed the connection."""
        assert self._process is not None
        end = time.monotonic() + _TO_END
        while not has_ended(self._process):
            if time.monotonic() > end:
                self.kill()
                return ToolFailed(f"{tool.name}: it closed the connection of its process", Reason.DIED)
            time.sleep(0.01)
        code = self.kill()
        if code >= 0:
            return ToolFailed(f"{tool.name}: it ended its process, with exit code {code}", Reason.DIED)
        if -code in FROM_OUTSIDE:
            return ToolLost(
                f"{tool.name}: its process was ended from outside ({signal.Signals(-code).name}) while it was at work"
            )
        return ToolFailed(f"{tool.name}: it ended its process, with {signal.Signals(-code).name}", Reason.DIED)


def _longest(max_output: int) -> int:
    """Bytes of an answer: JSON writes a character in twelve at most."""
    return 12 * max_output + 2**16
