"""Samples by a function of ours, in the thread that reads them and in the engine's own process.

It waits for nothing but the engine, one call after the other, and nothing of it is recorded. So its coroutines are
stepped here: as tasks of an event loop, thousands of short samples would take a quarter of a small engine's time.
"""

import threading
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextvars import Context as Place
from types import coroutine
from typing import Any

from cairn.engines.agents.episodes.context import Context
from cairn.engines.agents.episodes.recorder import SampleAborted, Unrecorded, alone
from cairn.engines.agents.episodes.runner import Generate, outcome
from cairn.engines.types.errors import EngineError, RequestRefused
from cairn.engines.types.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest, RequestId, SamplingParams, Stream

# What samples ask of an engine: every request gets one answer, and those that come later join those before them.


Answers = list[tuple[RequestId, Completion | RequestRefused]]


class Asking:
    """The requests of one stream. One thread takes the answers; another one may ask meanwhile."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._left: set[RequestId] = set()
        """What has no answer yet."""
        self._asked = 0
        """How often something was asked."""
        self._changed = threading.Condition()
        self._over = False

    def submit(self, requests: Sequence[GenerateRequest]) -> Answers:
        """Ask. Returns why some are refused; the others come with `answers`."""
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
            self._left.update(request.request_id for request in requests)
            self._asked += 1
            self._changed.notify_all()
        return refusals

    def answers(self) -> Answers:
        """The next ones; none where everything has its answer. Raises as streams do, and EngineError where one has
        ended without."""
        while True:
            asked, ended = self._asked, False
            try:
                answers: Answers = [(completion.request_id, completion) for completion in next(self._stream)]
            except RequestRefused as refused:
                answers = _refusals(refused)
            except StopIteration:
                answers, ended = [], True
            with self._changed:
                self._left.difference_update(id for id, _ in answers)
                if answers or not self._left:
                    return answers
                if ended and asked == self._asked:
                    lost = ", ".join("/".join(map(str, id)) for id in sorted(self._left))
                    raise EngineError(f"the engine gave fewer samples than asked: without those of requests {lost}")

    def wait(self) -> bool:
        """Until something is asked that has no answer, or nothing more will be: whether there is."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or self._over)
            return not self._over

    def end(self) -> None:
        """Nothing more will be asked, and nobody wants what is on its way."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


def _refusals(refused: RequestRefused) -> Answers:
    return [(id, RequestRefused({id: why})) for id, why in refused.refused.items()]


Code = Coroutine[GenerateRequest, Completion, GeneratedSample]
"""That of a sample, as far as it came: it gives what it asks, and takes the answer."""


class Beside:
    """Generates samples, in one call of `generate`."""

    def __init__(self, stream: Stream, params: SamplingParams, function: Generate) -> None:
        self._params = params
        self._function = function
        self._asking = Asking(stream)
        self._waiting: dict[RequestId, tuple[Place, Code]] = {}
        """Samples that wait for an answer, and where they run."""
        self._asked: list[GenerateRequest] = []
        """What the engine is still to be asked."""
        self._ended: list[GeneratedSample] = []
        self._turn = threading.Lock()
        """Held by the thread in which samples go on, or join."""
        self._aborted = self._over = False

    def generate(self, samples: Sequence[SampleRequest]) -> Iterator[list[GeneratedSample]]:
        """Generate samples, and those that join; yield each as it ends. Raises as streams do, but for requests that are
        refused, whose samples fail; and BadTrajectory."""
        try:
            with self._turn:
                self._begin(samples)
                ended = self._take()
            while not self._over:
                if ended:
                    yield ended
                answers = self._asking.answers() if self._waiting else ()
                with self._turn:
                    for id, answer in answers:
                        self._answer(id, answer)
                    self._ask_engine()
                    ended = self._take()
        finally:
            with self._turn:
                self._over = True
                for _, code in self._waiting.values():
                    code.close()

    def join(self, samples: Sequence[SampleRequest]) -> bool:
        """See `cairn.engines.agents.episodes.samples.SampleEngine`."""
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
            self._go_on(alone(sample.key), code, None)
        self._ask_engine()

    def _answer(self, id: RequestId, answer: Completion | RequestRefused) -> None:
        place, code = self._waiting.pop(id)
        self._aborted |= isinstance(answer, Completion) and answer.finish_reason == FinishReason.ABORT
        self._go_on(place, code, answer)

    def _go_on(self, place: Place, code: Code, answer: Completion | RequestRefused | None) -> None:
        """Let a sample go on until it asks the engine, or ends."""
        step: Any = code.throw if isinstance(answer, RequestRefused) else code.send
        try:
            request = place.run(step, answer)
        except StopIteration as end:
            self._ended.append(end.value)
        else:
            self._waiting[request.request_id] = place, code
            self._asked.append(request)

    @coroutine
    def _ask(self, request: GenerateRequest) -> Generator[GenerateRequest, Completion, Completion]:
        if self._aborted:
            raise SampleAborted
        return (yield request)

    def _ask_engine(self) -> None:
        while self._asked:
            asked, self._asked = self._asked, []
            for id, refused in self._asking.submit(asked):
                self._answer(id, refused)

    def _take(self) -> list[GeneratedSample]:
        """What has ended since; nothing, and all is over, when nobody waits."""
        ended, self._ended = self._ended, []
        self._over = not ended and not self._waiting
        return ended


def beside(
    stream: Stream, samples: Sequence[SampleRequest], params: SamplingParams, function: Generate
) -> Iterator[list[GeneratedSample]]:
    """Generate samples, where none are to join."""
    return Beside(stream, params, function).generate(samples)


def _no_tokenizer() -> None:
    raise NotImplementedError("a function of ours works on tokens")
