"""Execution of a built-in generate function, in the engine's own process and in the thread that reads the samples.

Such a function waits only for the engine, one call after the other, and its calls are not recorded. Its coroutines are
therefore stepped directly: as tasks of an event loop, thousands of short samples would take a quarter of a small
engine's time.
"""

import threading
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextvars import Context as Variables
from types import coroutine
from typing import Any

from cairn.engines.agents.episodes.context import Context
from cairn.engines.agents.episodes.recorder import SampleAborted, Unrecorded, context_of
from cairn.engines.agents.episodes.runner import Generate, outcome
from cairn.engines.types.errors import EngineError, RequestRefused
from cairn.engines.types.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest, RequestId, SamplingParams, Stream

# Requests of samples to an engine: each gets one response, and later requests join the stream of earlier ones.


Answers = list[tuple[RequestId, Completion | RequestRefused]]


class OpenRequests:
    """The requests of one stream. One thread takes the responses; another one may submit requests meanwhile."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._open: set[RequestId] = set()
        """Requests without a response."""
        self._submissions = 0
        """Number of calls of `submit`."""
        self._changed = threading.Condition()
        self._over = False

    def submit(self, requests: Sequence[GenerateRequest]) -> Answers:
        """Submit requests. Return the refusals; the other responses come from `answers`."""
        if not requests:
            return []
        with self._changed:
            refusals: Answers = []
            try:
                self._stream.submit(requests)
            except RequestRefused as refused:
                refusals = _refusals(refused)
                requests = [request for request in requests if request.request_id not in refused.refused]
                self._stream.submit(requests)
            self._open.update(request.request_id for request in requests)
            self._submissions += 1
            self._changed.notify_all()
        return refusals

    def answers(self) -> Answers:
        """Return the next responses; an empty list where no request is open.

        Raises the errors of streams, and EngineError where the stream has ended without a response to each request.
        """
        while True:
            submissions, ended = self._submissions, False
            try:
                answers: Answers = [(completion.request_id, completion) for completion in next(self._stream)]
            except RequestRefused as refused:
                answers = _refusals(refused)
            except StopIteration:
                answers, ended = [], True
            with self._changed:
                self._open.difference_update(id for id, _ in answers)
                if answers or not self._open:
                    return answers
                if ended and submissions == self._submissions:
                    lost = ", ".join("/".join(map(str, id)) for id in sorted(self._open))
                    raise EngineError(f"the engine returned fewer samples than requested: requests {lost} have none")

    def wait(self) -> bool:
        """Wait until a request is open; return True then, and False once `end` was called."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._over)
            return not self._over

    def end(self) -> None:
        """Declare that there will be no more requests, and that open ones are abandoned."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


def _refusals(refused: RequestRefused) -> Answers:
    return [(id, RequestRefused({id: why})) for id, why in refused.refused.items()]


Code = Coroutine[GenerateRequest, Completion, GeneratedSample]
"""The suspended code of a sample: it yields requests and receives completions."""


class InProcessGeneration:
    """The samples of one `generate` call."""

    def __init__(self, stream: Stream, params: SamplingParams, function: Generate) -> None:
        self._params = params
        self._function = function
        self._requests = OpenRequests(stream)
        self._waiting: dict[RequestId, tuple[Variables, Code]] = {}
        """Samples that wait for a response, each with the context that it runs in."""
        self._to_submit: list[GenerateRequest] = []
        """Requests that are not submitted yet."""
        self._ended: list[GeneratedSample] = []
        self._turn = threading.Lock()
        """Held by the thread that steps or adds samples."""
        self._aborted = self._over = False

    def generate(self, samples: Sequence[SampleRequest]) -> Iterator[list[GeneratedSample]]:
        """Generate samples, and those that join; yield each as it ends.

        Raises BadTrajectory, and the errors of streams except RequestRefused: a refused request fails its sample.
        """
        try:
            with self._turn:
                self._begin(samples)
                ended = self._take()
            while not self._over:
                if ended:
                    yield ended
                answers = self._requests.answers() if self._waiting else ()
                with self._turn:
                    for id, answer in answers:
                        self._answer(id, answer)
                    self._submit()
                    ended = self._take()
        finally:
            with self._turn:
                self._over = True
                for _, code in self._waiting.values():
                    code.close()

    def join(self, samples: Sequence[SampleRequest]) -> bool:
        """Add samples to the running call, see `cairn.engines.agents.episodes.samples.SampleEngine`."""
        with self._turn:
            if self._over or self._aborted:
                return False
            self._begin(samples)
            return True

    def _begin(self, samples: Sequence[SampleRequest]) -> None:
        for sample in samples:
            recorder = Unrecorded()
            context = Context(sample, self._params, self._ask, _no_tokenizer, recorder)
            code = outcome(self._function, context, sample, recorder, lambda: self._aborted)
            self._run_until_request(context_of(sample.key), code, None)
        self._submit()

    def _answer(self, id: RequestId, answer: Completion | RequestRefused) -> None:
        context, code = self._waiting.pop(id)
        self._aborted |= isinstance(answer, Completion) and answer.finish_reason == FinishReason.ABORT
        self._run_until_request(context, code, answer)

    def _run_until_request(self, context: Variables, code: Code, answer: Completion | RequestRefused | None) -> None:
        """Run a sample's code until its next request or its end."""
        step: Any = code.throw if isinstance(answer, RequestRefused) else code.send
        try:
            request = context.run(step, answer)
        except StopIteration as end:
            self._ended.append(end.value)
        else:
            self._waiting[request.request_id] = context, code
            self._to_submit.append(request)

    @coroutine
    def _ask(self, request: GenerateRequest) -> Generator[GenerateRequest, Completion, Completion]:
        if self._aborted:
            raise SampleAborted
        return (yield request)

    def _submit(self) -> None:
        while self._to_submit:
            requests, self._to_submit = self._to_submit, []
            for id, refused in self._requests.submit(requests):
                self._answer(id, refused)

    def _take(self) -> list[GeneratedSample]:
        """Return the samples that have ended since; mark the call as over where there are none and no sample waits."""
        ended, self._ended = self._ended, []
        self._over = not ended and not self._waiting
        return ended


def _no_tokenizer() -> None:
    raise NotImplementedError("a built-in function works on tokens")
