"""A rollout engine's stream for clients in other processes. Its other end is in `cairn.engines.fleet.actors`."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Concatenate

from cairn.engines.agents.episodes.in_process import Answers
from cairn.engines.fleet.actors import RolloutActor
from cairn.engines.fleet.calls import Deadline, result
from cairn.engines.fleet.fencing import Callee, P, R
from cairn.engines.types.errors import EngineError, RequestRefused, Superseded
from cairn.engines.types.types import Completion, GenerateRequest, RequestId

SUBMITTING = "submitting"
"""Concurrency group of the short calls of clients in other processes to a rollout engine."""

TAKING = "taking"
"""Concurrency group of their calls that wait for answers, one at a time for each client."""

PATIENCE = 5.0
"""Seconds after which the engine reports that there is no answer yet."""


@dataclass(frozen=True)
class RemoteEngine:
    """A rollout engine, for a client process that acts for one driver."""

    actor: Callee
    name: str
    """Name of the actor, for messages."""
    client: str
    """Name of the client."""
    timeout: float
    """Seconds that a call may take."""

    def open(self) -> "RemoteStream":
        """Open a stream of the engine; one at a time. Raises EngineDied, EngineTimeout and Superseded, as the methods
        below do."""
        self.call(SUBMITTING, RolloutActor.open_stream)
        return RemoteStream(self)

    def abort(self) -> None:
        """Abort the client's requests."""
        self.call(SUBMITTING, RolloutActor.abort_stream)

    def call(self, group: str, method: Callable[Concatenate[Any, str, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of a method of the engine's actor that is called for this client."""
        ref = replace(self.actor, options={"concurrency_group": group}).call(method, self.client, *args, **kwargs)
        patience = PATIENCE if group == TAKING else 0.0
        return result(ref, Deadline(self.timeout + patience), f"{self.name}.{method.__name__}()")


class RemoteStream:
    """A `Stream` of an engine in another process. Requests that come while a call is under way go with the next
    call."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._to_submit: list[GenerateRequest] = []
        self._left = 0
        """Number of requests without an answer."""
        self._answers: deque[Completion] = deque()
        self._error: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._send_requests, name="submit-requests", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Submit requests. Iterating the stream raises refusals later."""
        with self._changed:
            self._to_submit += requests
            self._left += len(requests)
            self._changed.notify_all()

    def __iter__(self) -> "RemoteStream":
        return self

    def __next__(self) -> list[Completion]:
        while True:
            with self._changed:
                if self._error is not None:
                    raise self._error
                if self._closed or not self._left:
                    raise StopIteration
            answers: Answers = []
            if self._answers:
                return self._taken(answers)
            try:
                answers = self._engine.call(TAKING, RolloutActor.take_completions, PATIENCE)
            except Exception as error:
                with self._changed:
                    if self._closed:
                        raise StopIteration from None
                    self._error = self._error or error
                raise
            if answers:
                return self._taken(answers)

    def abort(self) -> None:
        self._engine.abort()

    def close(self) -> None:
        with self._changed:
            closed, self._closed = self._closed, True
            self._changed.notify_all()
        if closed:
            return
        self._thread.join()
        with suppress(EngineError, Superseded):  # it is gone, or another driver has it: other calls report that
            self._engine.call(SUBMITTING, RolloutActor.close_stream)

    def _taken(self, answers: Answers) -> list[Completion]:
        refused: dict[RequestId, str] = {}
        with self._changed:
            for _, answer in answers:
                if isinstance(answer, RequestRefused):
                    refused |= answer.refused
                else:
                    self._answers.append(answer)
            if refused:
                self._left -= len(refused)
                raise RequestRefused(refused)
            completions = list(self._answers)
            self._answers.clear()
            self._left -= len(completions)
            return completions

    def _send_requests(self) -> None:
        """Send submitted requests to the engine, in a thread of its own."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._to_submit or self._closed)
                if self._closed:
                    return
                requests, self._to_submit = self._to_submit, []
            try:
                self._engine.call(SUBMITTING, RolloutActor.submit, requests)
            except Exception as error:
                with self._changed:
                    self._error = self._error or error
                return
