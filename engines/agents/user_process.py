"""Main program of the process that runs the user's `generate`; `user_code.py` describes its messages."""

import os
import queue
import threading
from collections.abc import Sequence
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any

from cairn.configs.kinds import GENERATE, written_for_slime
from cairn.engines.agents.episodes.runner import Generate, Runner
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.agents.episodes.watchdog import Heartbeat, TurnLoop, Watchdog
from cairn.engines.agents.tools.processes import allow_network, in_turn
from cairn.engines.agents.tools.programs import require_sandboxes
from cairn.engines.agents.tools.tool import load_tools
from cairn.engines.processes.child import die_with
from cairn.engines.types.trajectories import SampleRequest
from cairn.engines.types.types import SamplingParams


class _Process:
    """The samples on the loop of this thread, and the pipe to the engine."""

    def __init__(self, connection: Connection, heartbeat: Heartbeat) -> None:
        self._connection = connection
        self._heartbeat = heartbeat
        in_turn.set(heartbeat.of_a_thread)
        self._outbox: queue.Queue[tuple[str, Any]] = queue.Queue()
        threading.Thread(target=self._send, daemon=True).start()

    def run(self) -> None:
        """Generate samples, one call after the other, until the engine closes the connection."""
        while True:
            try:
                kind, content = self._connection.recv()
            except (EOFError, OSError):
                return
            if kind == "samples":  # not an abort that came too late
                self._generate(*content)

    def _generate(self, samples: Sequence[SampleRequest], function: GenerateFunction, params: SamplingParams) -> None:
        loop = TurnLoop(self._heartbeat)
        try:
            tokenizer = cache(partial(_tokenizer, function.tokenizer))
            options = function.options
            require_sandboxes(options.tools, options.tool_options)
            allow_network(options.tool_options.network)
            tools = cache(partial(load_tools, options.tools, options.tool_options))
            runner = Runner(loop, load_generate(function.name), params, tokenizer, tools, options)
            runner.begin(samples)
            deadlines, hung = (function.timeout, function.episode_timeout), partial(self._post, "hung")
            with Watchdog(loop, runner, samples, *deadlines, hung, self._heartbeat) as watchdog:
                loop.add_reader(self._connection.fileno(), self._receive, runner, watchdog)
                loop.run_until_complete(self._until_ended(runner))
                loop.remove_reader(self._connection.fileno())
                self._outbox.join()  # results are sent before cancelled code may hold the lock
                may_stay = runner.close()  # runs code of samples, so it is watched too
        # The engine's process needs every error, of whatever type.
        except Exception as error:
            self._post("failed", error)
        else:
            self._post("done", may_stay)

    async def _until_ended(self, runner: Runner) -> None:
        while runner.left or runner.ended:
            await runner.changed()
            self._post_all("requests", runner.requests)
            if (recorded := runner.recorded()) is not None:  # before what ends with it
                self._post("recorded", recorded)
            self._post_all("ended", runner.ended)

    def _post_all(self, kind: str, content: list[Any]) -> None:
        if content:
            self._post(kind, content.copy())
            content.clear()

    def _post(self, kind: str, content: Any) -> None:
        self._outbox.put((kind, content))

    def _receive(self, runner: Runner, watchdog: Watchdog) -> None:
        try:
            kind, content = self._connection.recv()
        except (EOFError, OSError):
            os._exit(1)  # the engine is gone
        if kind == "abort":
            runner.abort()
            return
        if kind == "acknowledged":
            runner.acknowledge(content)
            return
        for id, answer in content:
            watchdog.restart(id[:2])
            runner.answer(id, answer)

    def _send(self) -> None:
        """Send messages from a thread, so that the process can receive meanwhile."""
        while True:
            message = self._outbox.get()
            try:
                self._connection.send(message)
            except OSError:
                os._exit(1)
            self._outbox.task_done()


def main(connection_fd: int, parent: int, heartbeat_fd: int) -> None:
    """Serve the process `parent` over an inherited connection; the parent reads the heartbeat."""
    die_with(parent)
    os.set_inheritable(connection_fd, False)
    heartbeat = Heartbeat(heartbeat_fd)
    os.close(heartbeat_fd)
    _Process(Connection(connection_fd), heartbeat).run()


def load_generate(name: str) -> Generate:
    """Import a generate function; one that was written for slime is adapted. Raises BadPlugin."""
    function = GENERATE.load(name)
    if not written_for_slime(function):
        return function
    from cairn.engines.agents.slime import adapted  # imports a server, which other functions do not need

    return adapted(function)


def _tokenizer(folder: str) -> Any:
    from cairn.engines.models.tokenizers import read_tokenizer

    return read_tokenizer(folder)
