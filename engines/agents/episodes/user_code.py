"""The user's `generate`, in a process next to the engine.

User code hangs, leaks and crashes, so a separate Python process runs it. It runs all samples of a call on one loop
(`runner.py`), and stays for the next call of the same function, unless one failed. Messages go over a pipe, pickled,
each with all that is new since the last one:

| from | message | content |
|---|---|---|
| engine | `samples` | the samples to generate: a call begins |
| process | `requests` | requests for the engine, which join its running batch |
| engine | `answered` | completions and refusals, by the requests' ids |
| process | `recorded` | records of samples' calls, to be made durable |
| engine | `acknowledged` | number up to which records are durable |
| process | `ended` | samples that have ended |
| engine | `abort` | end the others with their partial results |
| process | `hung` | a sample blocks the others: the process is unusable. Where it holds the interpreter's lock, the \
process cannot send this: the engine's side detects it from the heartbeat |
| process | `failed`, `done` | end of the call: with an error that belongs to no sample, or without |

A process that exits by itself does so because of one of its samples: GenerationFailed, so that the suspects are found.
A process that is killed from outside, as by the OOM killer, incriminates no sample: ProcessLost.
"""

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cairn.engines.agents.episodes.context import EpisodeOptions
from cairn.engines.agents.episodes.in_process import OpenRequests
from cairn.engines.agents.episodes.watchdog import Heartbeat, Watch, blocked_message
from cairn.engines.processes.child import Child
from cairn.engines.types.errors import GenerationFailed
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleKey, SampleRequest
from cairn.engines.types.types import SamplingParams, Stream

SINGLE_TURN = "single_turn"
"""The built-in function that calls the policy once."""


@dataclass(frozen=True)
class GenerateFunction:
    """A `generate` function by name, for use in another process."""

    name: str
    """Name in the format of `rollout.custom_generate_function_path`; the path of a file is absolute."""
    search: tuple[str, ...] = ()
    """`sys.path` for the import of a user's function."""
    tokenizer: str = ""
    """Folder of the model whose tokenizer a user's function may use."""
    timeout: float = 600.0
    """Seconds that a user's function may spend on a sample at a time; waiting for the engine does not count."""
    episode_timeout: float | None = None
    """Seconds that a user's function may spend on a sample in total, from the start of its code; None is unlimited."""
    options: EpisodeOptions = field(default_factory=EpisodeOptions)
    """Other options of its samples."""

    @property
    def records(self) -> bool:
        """Whether it runs in a process of its own and its calls are recorded: true for all functions but
        `SINGLE_TURN`."""
        return self.name != SINGLE_TURN


class SampleHung(Exception):
    """A sample's code took too long and blocked the others."""

    def __init__(self, key: SampleKey, message: str) -> None:
        super().__init__(message)
        self.key = key


class ProcessLost(Exception):
    """The process was killed from outside: what was in flight is lost."""


class UserCode:
    """The process of one function, for consecutive calls."""

    def __init__(self, function: GenerateFunction) -> None:
        self._function = function
        with Heartbeat.shared() as (self._heartbeat, fd):
            source = function.name if "." in function.name else None
            self._child = Child(
                "cairn.engines.agents.user_process", [fd], search=function.search, files=[fd], source=source
            )
        self._idle = True
        self._killed = False
        self._sending = threading.Lock()

    def can_generate(self, function: GenerateFunction) -> bool:
        """Return whether the process is idle and runs this function."""
        return self._idle and self._function == function and not self._child.has_ended

    def generate(
        self, stream: Stream, samples: Sequence[SampleRequest], params: SamplingParams
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        """Generate samples; yield them as they end, their records first. Unless the iterator is exhausted, the process
        ends.

        Raises the errors of the stream, BadTrajectory, BadPlugin, SampleHung, GenerationFailed where the process has
        exited by itself, and ProcessLost.
        """
        self._idle = False
        requests = OpenRequests(stream)
        events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=target, args=(requests, events), name=name, daemon=True)
            for target, name in ((self._receive, "user-code"), (self._send_responses, "user-code-answers"))
        ]
        self._send("samples", (samples, self._function, params))
        try:
            for thread in threads:
                thread.start()
            with self._watch(events):
                while (event := events.get())[0] != "done":
                    yield self._result(*event)
            self._idle = event[1]
        finally:
            if not self._idle:
                self.kill()
            requests.end()
            stream.close()
            for thread in threads:
                thread.join()

    def abort(self) -> None:
        """Request the partial results of all samples; thread-safe."""
        if not self._idle:
            self._send("abort", None)

    def acknowledge(self, number: int) -> None:
        """Confirm that the records with this number, and all before them, are durable; thread-safe."""
        self._send("acknowledged", number)

    def kill(self) -> int:
        """Kill the process. Return its exit code."""
        self._killed = True
        return self._child.kill()

    def __del__(self) -> None:
        self.kill()

    def _result(self, kind: str, content: Any) -> list[GeneratedSample] | Recorded:
        if kind in ("ended", "recorded"):
            came: list[GeneratedSample] | Recorded = content
            return came
        if kind == "failed":
            raise content
        if kind == "hung":
            key, message = content
            raise GenerationFailed(message) if key is None else SampleHung(key, message)
        killed, ended = self._killed, self._child.wait()
        if ended.from_outside and not killed:
            raise ProcessLost(f"the process of {self._function.name} was ended from outside ({ended.signal})")
        raise GenerationFailed(
            f"the process of {self._function.name} ended with exit code {ended.code} while it generated: "
            "its output is in the engine's log"
        )

    def _send(self, kind: str, content: Any) -> None:
        with self._sending, suppress(OSError):  # where the process is gone, `_receive` reports it
            self._child.connection.send((kind, content))

    def _watch(self, events: "queue.SimpleQueue[tuple[str, Any]]") -> Watch:
        function = self._function
        seconds = min(function.timeout, function.episode_timeout or function.timeout)

        def hung(key: SampleKey | None) -> None:
            events.put(("hung", (key, blocked_message(seconds))))

        return Watch(self._heartbeat, self._child.pid, seconds, hung)

    def _receive(self, requests: OpenRequests, events: "queue.SimpleQueue[tuple[str, Any]]") -> None:
        """Receive the process's messages until the call ends; runs in a thread. Requests join the stream at once."""
        kind = ""
        try:
            while kind not in ("done", "failed", "hung"):
                kind, content = self._child.connection.recv()
                if kind != "requests":
                    events.put((kind, content))
                elif refusals := requests.submit(content):
                    self._send("answered", refusals)
        except (EOFError, OSError):
            events.put(("gone", None))
        except BaseException as error:
            events.put(("failed", error))

    def _send_responses(self, requests: OpenRequests, events: "queue.SimpleQueue[tuple[str, Any]]") -> None:
        """Send the engine's responses to the process; runs in a thread."""
        try:
            while requests.wait():
                if answers := requests.answers():
                    self._send("answered", answers)
        except BaseException as error:
            events.put(("failed", error))
