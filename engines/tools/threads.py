"""Plain functions that cannot leave the process of their episode, such as a bound method: each call in a thread.

A thread cannot be ended: one that is late goes on, and nobody waits for it. So many may be late at a time and no more:
then nothing is called until one of them has ended.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any

from cairn.engines.tools.errors import ToolUnavailable

MOST_LATE = 64
"""Threads that may go on after their deadline."""

in_turn: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("in_turn", default=nullcontext)
"""Called where a call begins; what it returns is entered by the thread of the call."""

_late: set[threading.Thread] = set()


async def in_a_thread(function: Callable[[], Any], timeout: float) -> Any:
    """What `function` returns or raises. Raises TimeoutError where it is late, and ToolUnavailable where too many
    are."""
    _late.difference_update([thread for thread in _late if not thread.is_alive()])
    if len(_late) >= MOST_LATE:
        raise ToolUnavailable(
            f"{MOST_LATE} calls of tools go on after their deadlines, in threads, which cannot be ended: let the tools "
            "be functions of a module, or coroutine functions"
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
