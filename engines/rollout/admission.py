"""Admission: a bound on the tokens of the requests that an engine has at a time. Requests beyond it wait.

A request counts with its input, and with the tokens that it may have sampled at its end. Samples take turns, one
request at a time, in the order of their first requests. So a sample that requests a thousand continuations at once
waits for most of them, and delays no other sample. The next request waits until there is room for it, and no smaller
request overtakes it. A request that is larger than the bound is served alone.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cairn.engines.types.errors import EngineError, RequestRefused
from cairn.engines.types.types import Completion, GenerateRequest, RequestId, Stream

# Use of an engine: by any number of running samples, or by one caller that changes its weights or its memory.


class Occupancy:
    """Occupancy of one engine. Nothing waits here: a call that comes too early is rejected."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples = 0
        self._changes = False

    @property
    def generating(self) -> bool:
        """Whether samples are running."""
        return self._samples > 0

    def enter(self, samples: int) -> None:
        """Record that `samples` samples begin. Raises EngineError while the engine is being changed."""
        with self._lock:
            if self._changes:
                raise EngineError("The engine's weights or memory are being changed: wait for that before generating.")
            self._samples += samples

    def leave(self, samples: int) -> None:
        """Record that `samples` samples have ended."""
        with self._lock:
            self._samples -= samples

    @contextmanager
    def alone(self, action: str) -> Iterator[None]:
        """Hold the engine exclusively. Raises EngineError where it is in use."""
        with self._lock:
            if self._samples or self._changes:
                raise EngineError(f"The engine is generating: abort that call or wait for it before you {action}.")
            self._changes = True
        try:
            yield
        finally:
            self._changes = False


class Admission:
    """Admission to one engine, for all its streams."""

    def __init__(self, max_tokens: int | None) -> None:
        """`max_tokens`: None sets no bound, and nothing is counted."""
        self.max_tokens = max_tokens
        self.changed = threading.Condition()
        """Lock for all changes here and in the streams."""
        self._turns: deque[tuple[BoundedStream, Any]] = deque()
        """Samples that wait, in order."""
        self._waiting: dict[tuple[BoundedStream, Any], deque[GenerateRequest]] = {}
        self._tokens = self._tokens_max = 0
        self._open = set[BoundedStream]()

    def open(self, stream: Stream) -> Stream:
        """Return a stream that passes its requests to the engine's own `stream` when there is room."""
        if self.max_tokens is None:
            return stream
        bounded = BoundedStream(self, stream)
        with self.changed:
            if not self._open:
                self._tokens_max = 0
            self._open.add(bounded)
        return bounded

    def usage(self) -> dict[str, int]:
        """Return the most tokens that requests had with the engine at a time since it had no stream; nothing without a
        bound."""
        return {} if self.max_tokens is None else {"tokens_in_flight_max": self._tokens_max}

    def wait(self, stream: "BoundedStream", request: GenerateRequest) -> None:
        """Queue a request until its turn. The caller holds `changed`, here and below."""
        turn = (stream, request.request_id[:2])
        if turn not in self._waiting:
            self._waiting[turn] = deque()
            self._turns.append(turn)
        self._waiting[turn].append(request)

    def leave(self, tokens: int) -> None:
        """Release the tokens of requests that have ended."""
        self._tokens -= tokens

    def forget(self, stream: "BoundedStream") -> None:
        """Remove a closed stream, and all of its requests that wait."""
        self._open.discard(stream)
        self._turns = deque(turn for turn in self._turns if turn[0] is not stream)
        self._waiting = {turn: requests for turn, requests in self._waiting.items() if turn[0] is not stream}

    def submit_waiting(self) -> None:
        """Submit to the engine what there is room for. The caller does not hold `changed`."""
        with self.changed:
            while ready := self._next():
                for stream, requests in ready.items():
                    stream.begin(requests)  # a refused request leaves its room to others
            self.changed.notify_all()

    def _next(self) -> "dict[BoundedStream, list[GenerateRequest]]":
        """Return the requests that there is room for."""
        ready: dict[BoundedStream, list[GenerateRequest]] = defaultdict(list)
        while self._turns:
            turn = self._turns[0]
            request, stream = self._waiting[turn][0], turn[0]
            tokens = tokens_of(request)
            assert self.max_tokens is not None
            if self._tokens and self._tokens + tokens > self.max_tokens and not stream.aborted:
                break
            self._tokens += tokens
            self._tokens_max = max(self._tokens_max, self._tokens)
            self._waiting[turn].popleft()
            self._turns.popleft()
            if self._waiting[turn]:
                self._turns.append(turn)
            else:
                del self._waiting[turn]
            stream.in_flight[request.request_id] = tokens
            ready[stream].append(request)
        return ready


class BoundedStream:
    """A `Stream` whose requests wait for admission."""

    def __init__(self, admission: Admission, stream: Stream) -> None:
        self._admission = admission
        self._stream = stream
        self._waiting = 0
        self._refused: dict[RequestId, str] = {}
        self._error: Exception | None = None
        self.in_flight: dict[RequestId, int] = {}
        """Requests that the engine has, with the tokens of each."""
        self.aborted = False

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Queue requests. Those that cannot be served are refused when their turn comes."""
        with self._admission.changed:
            for request in requests:
                self._admission.wait(self, request)
            self._waiting += len(requests)
        self._admission.submit_waiting()

    def begin(self, requests: list[GenerateRequest]) -> None:
        """Submit requests whose turn has come. The caller holds `changed`."""
        self._waiting -= len(requests)
        try:
            try:
                self._stream.submit(requests)
            except RequestRefused as refused:
                self._refused |= refused.refused
                self._left(refused.refused)
                self._stream.submit([request for request in requests if request.request_id not in refused.refused])
        except EngineError as error:
            self._error = error

    def __iter__(self) -> "BoundedStream":
        return self

    def __next__(self) -> list[Completion]:
        admission = self._admission
        while True:
            with admission.changed:
                admission.changed.wait_for(lambda: self.in_flight or self._refused or self._error or not self._waiting)
                if self._refused:
                    refused, self._refused = self._refused, {}
                    raise RequestRefused(refused)
                error, self._error = self._error, None
                ended = not self.in_flight
            if error is not None:
                self.close()
                raise error
            if ended:
                raise StopIteration
            try:
                completions = next(self._stream)
            except StopIteration:
                continue  # requests in flight came after the stream ended, or were refused
            except RequestRefused as late:
                self._release(late.refused)
                raise
            except Exception:
                self.close()
                raise
            self._release([completion.request_id for completion in completions])
            return completions

    def abort(self) -> None:
        with self._admission.changed:
            self.aborted = True
        self._stream.abort()
        self._admission.submit_waiting()

    def close(self) -> None:
        with self._admission.changed:
            self._admission.forget(self)
            self._waiting = 0
            ids = list(self.in_flight)
        self._stream.close()
        self._release(ids)

    def _release(self, ids: "Sequence[RequestId] | dict[RequestId, str]") -> None:
        with self._admission.changed:
            self._left(ids)
        self._admission.submit_waiting()

    def _left(self, ids: "Sequence[RequestId] | dict[RequestId, str]") -> None:
        self._admission.leave(sum(self.in_flight.pop(id, 0) for id in ids))


def tokens_of(request: GenerateRequest) -> int:
    """Return the number of tokens that a request may have at its end."""
    return len(request.input_ids) + request.sampling_params.max_new_tokens - request.position
