"""What runs in the process of the user's `generate`: see `user_code.py` for what it hears and says."""

import asyncio
import ctypes
import os
import queue
import signal
import sys
import threading
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any

from cairn.configs.kinds import GENERATE
from cairn.engines.rollout.runner import Runner

_PR_SET_PDEATHSIG = 1


class _Process:
    """The samples, on the loop of this thread, and the pipe to the engine."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outbox: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()

    def run(self) -> None:
        """Generate all samples, and say so."""
        _, (samples, function, params) = self._connection.recv()
        loop = asyncio.new_event_loop()
        try:
            runner = Runner(loop, GENERATE.load(function.name), params, cache(partial(_tokenizer, function.tokenizer)))
            runner.begin(samples)
            loop.add_reader(self._connection.fileno(), self._hear, runner)
            loop.run_until_complete(self._until_ended(runner))
        # Whatever it is, the engine's process has to hear of it.
        except Exception as error:
            self._outbox.put(("failed", error))
        else:
            self._outbox.put(("done", None))
        self._outbox.put(None)
        self._sender.join()

    async def _until_ended(self, runner: Runner) -> None:
        while runner.left:
            await runner.stirred()
            self._say("asked", runner.asked)
            self._say("ended", runner.ended)

    def _say(self, kind: str, content: list[Any]) -> None:
        if content:
            self._outbox.put((kind, content.copy()))
            content.clear()

    def _hear(self, runner: Runner) -> None:
        try:
            kind, content = self._connection.recv()
        except (EOFError, OSError):
            os._exit(1)  # the engine has no use for it any more
        if kind == "abort":
            runner.abort()
            return
        for id, answer in content:
            runner.answer(id, answer)

    def _send(self) -> None:
        """In a thread, so that it hears while it says something."""
        while (message := self._outbox.get()) is not None:
            self._connection.send(message)


def main(connection_fd: int, parent: int) -> None:
    """Generate what the process `parent` asks for, over an inherited connection."""
    _die_with(parent)
    os.set_inheritable(connection_fd, False)
    _Process(Connection(connection_fd)).run()


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even if user code is busy."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
