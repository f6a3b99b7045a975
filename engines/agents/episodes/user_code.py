"""The user's `generate`, in a process of its own beside the engine.

User code hangs, leaks and crashes, so the engine has a Python process for it, which runs all samples of a call on one
loop (`runner.py`) and stays for the next call of the same function, unless one went wrong. Messages go over a pipe,
pickled, each with all that came up since the last one:

| from | message | means |
|---|---|---|
| here | `samples` | what to generate: a call begins |
| there | `asked` | requests for the engine, which join what it is at work on |
| here | `answered` | completions and refusals, by the requests' ids |
| there | `recorded` | what samples were given, to be made durable |
| here | `acknowledged` | that it is, up to a number |
| there | `ended` | samples that have ended |
| here | `abort` | give the others back as far as they came |
| there | `hung` | a sample keeps the others from their turn: the process is of no more use. Where it keeps the \
interpreter's lock, the process says nothing: then it is said here, by its heartbeat |
| there | `failed`, `done` | the end of the call: an error that is nobody's sample's, or none |

A process that ends by itself is the doing of one of its samples: GenerationFailed, so that the suspects are found. One
that is ended from outside, as by the OOM killer, is nobody's: ProcessLost.
"""

import queue
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from cairn.engines.agents.episodes.beside import Asking
from cairn.engines.agents.episodes.context import EpisodeOptions
from cairn.engines.agents.episodes.watchdog import Heartbeat, Watch, blocked
from cairn.engines.processes.child import FROM_OUTSIDE, ends_within, has_ended, kill_group, launch
from cairn.engines.types.errors import GenerationFailed
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleKey, SampleRequest
from cairn.engines.types.types import SamplingParams, Stream

SINGLE_TURN = "single_turn"
"""The function of ours that asks the policy once."""
_TO_END = 10.0
"""Seconds that a process which hung up may take to be gone."""


@dataclass(frozen=True)
class GenerateFunction:
    """A `generate`, by name, for another process."""

    name: str
    """As `rollout.custom_generate_function_path` has it; a file's path is absolute."""
    search: tuple[str, ...] = ()
    """`sys.path` where yours is looked for."""
    tokenizer: str = ""
    """Folder of the model whose tokenizer yours may ask for."""
    timeout: float = 600.0
    """Seconds that yours may spend on a sample at a time, besides waiting for the engine."""
    episode_timeout: float | None = None
    """Seconds that yours may take for a sample in all, from where its code begins to run; None has no bound."""
    options: EpisodeOptions = field(default_factory=EpisodeOptions)
    """What its samples are given besides."""

    @property
    def records(self) -> bool:
        """Whether it runs in a process of its own, and what its samples are given is recorded: all but one call of the
        policy are."""
        return self.name != SINGLE_TURN


class SampleHung(Exception):
    """A sample's code took too long, and the others with it."""

    def __init__(self, key: SampleKey, told: str) -> None:
        super().__init__(told)
        self.key = key


class ProcessLost(Exception):
    """Something outside ended the process: what was in flight is lost."""


class UserCode:
    """The process of one function, for one call after the other."""

    def __init__(self, function: GenerateFunction) -> None:
        self._function = function
        self._process, self._connection, self._heartbeat = self._launch()
        self._idle = True
        self._killed = False
        self._sending = threading.Lock()

    def can_generate(self, function: GenerateFunction) -> bool:
        """Whether it has this function, and nothing else to do."""
        return self._idle and self._function == function and not has_ended(self._process)

    def generate(
        self, stream: Stream, samples: Sequence[SampleRequest], params: SamplingParams
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        """Generate samples; yield them as they end, and what is recorded of them before. The process is gone where this
        is not read to its end.

        Raises what the stream raises, BadTrajectory, BadPlugin, SampleHung, GenerationFailed where the process has
        ended by itself, and ProcessLost.
        """
        self._idle = False
        asking = Asking(stream)
        events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=target, args=(asking, events), name=name, daemon=True)
            for target, name in ((self._hear, "user-code"), (self._answer, "user-code-answers"))
        ]
        self._send("samples", (samples, self._function, params))
        try:
            for thread in threads:
                thread.start()
            with self._watch(events):
                while (event := events.get())[0] != "done":
                    yield self._ended(*event)
            self._idle = event[1]
        finally:
            if not self._idle:
                self.kill()
            asking.end()
            stream.close()
            for thread in threads:
                thread.join()

    def abort(self) -> None:
        """From any thread: have all samples back soon, as far as they came."""
        if not self._idle:
            self._send("abort", None)

    def acknowledge(self, number: int) -> None:
        """From any thread: what came with this number, and all before it, is durable."""
        self._send("acknowledged", number)

    def kill(self) -> int:
        """End the process, whatever it is at. Returns its exit code."""
        self._killed = True
        kill_group(self._process)
        return self._process.wait()

    def __del__(self) -> None:
        self.kill()

    def _ended(self, kind: str, content: Any) -> list[GeneratedSample] | Recorded:
        if kind in ("ended", "recorded"):
            came: list[GeneratedSample] | Recorded = content
            return came
        if kind == "failed":
            raise content
        if kind == "hung":
            key, told = content
            raise GenerationFailed(told) if key is None else SampleHung(key, told)
        not_by_us = ends_within(_TO_END, self._process) and not self._killed
        code = self.kill()
        if not_by_us and -code in FROM_OUTSIDE:
            raise ProcessLost(
                f"the process of {self._function.name} was ended from outside ({signal.Signals(-code).name})"
            )
        raise GenerationFailed(
            f"the process of {self._function.name} ended with exit code {code} while it generated: what it wrote "
            "stands in the engine's log"
        )

    def _send(self, kind: str, content: Any) -> None:
        with self._sending, suppress(OSError):  # where the process is gone, whoever hears it says so
            self._connection.send((kind, content))

    def _watch(self, events: "queue.SimpleQueue[tuple[str, Any]]") -> Watch:
        function = self._function
        seconds = min(function.timeout, function.episode_timeout or function.timeout)

        def hung(key: SampleKey | None) -> None:
            events.put(("hung", (key, blocked(seconds))))

        return Watch(self._heartbeat, self._process.pid, seconds, hung)

    def _hear(self, asking: Asking, events: "queue.SimpleQueue[tuple[str, Any]]") -> None:
        """In a thread: whatever the process says until the call has ended. What it asks joins the stream at once."""
        kind = ""
        try:
            while kind not in ("done", "failed", "hung"):
                kind, content = self._connection.recv()
                if kind != "asked":
                    events.put((kind, content))
                elif refusals := asking.submit(content):
                    self._send("answered", refusals)
        except (EOFError, OSError):
            events.put(("gone", None))
        except BaseException as error:
            events.put(("failed", error))

    def _answer(self, asking: Asking, events: "queue.SimpleQueue[tuple[str, Any]]") -> None:
        """In a thread: tell the process what becomes of what it asked."""
        try:
            while asking.wait():
                if answers := asking.answers():
                    self._send("answered", answers)
        except BaseException as error:
            events.put(("failed", error))

    def _launch(self) -> tuple["subprocess.Popen[bytes]", Connection, Heartbeat]:
        here, there = Pipe()
        with there, Heartbeat.shared() as (heartbeat, fd):
            process = launch("cairn.engines.agents.user_process", there, [fd], search=self._function.search, files=[fd])
        return process, here, heartbeat
