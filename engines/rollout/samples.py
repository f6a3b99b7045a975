"""What makes an engine of requests one of samples: `generate` runs beside it, in its process where it is ours."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from cairn.configs.kinds import GENERATE
from cairn.engines.errors import EngineError, RequestRefused
from cairn.engines.rollout.runner import Generate, Runner
from cairn.engines.rollout.user_code import GenerateFunction, UserCode
from cairn.engines.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types import Completion, GenerateRequest, RequestId, SamplingParams

Generates = Callable[[Sequence[GenerateRequest]], Iterator[list[Completion]]]
Answers = list[tuple[RequestId, Completion | RequestRefused]]


class SampleEngine:
    """Generates samples with a rollout engine."""

    def __init__(self, generate: Generates, abort: Callable[[], None]) -> None:
        """`generate` and `abort` are the engine's."""
        self._generate = generate
        self._abort = abort
        self._user_code: UserCode | None = None

    def generate(
        self, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample]]:
        """Generate samples; yield each as it ends. What is asked while the engine decodes waits until it is done.

        Raises as the engine's `generate` does, but for requests that it refuses: their samples fail. Raises
        BadTrajectory where what the function returned is none.
        """
        if not function.is_users:
            yield from beside(self._generate, samples, params, GENERATE.load(function.name))
            return
        with UserCode(function, samples, params) as user_code:
            self._user_code = user_code
            while (asked := user_code.asked()) is not None:
                yield user_code.ended()
                for answers in _answered(self._generate, asked):
                    user_code.answer(answers)
                    yield user_code.ended()
            yield user_code.ended()

    def abort(self) -> None:
        """End the running `generate` soon, from any thread: it yields each unfinished sample as far as it came. Without
        a running one this does nothing."""
        if (user_code := self._user_code) is not None:
            user_code.abort()
        self._abort()


def beside(
    engine: Generates, samples: Sequence[SampleRequest], params: SamplingParams, function: Generate
) -> Iterator[list[GeneratedSample]]:
    """Generate samples by a function that waits for nothing but the engine, in this thread."""
    loop = asyncio.new_event_loop()
    runner = Runner(loop, function, params, _no_tokenizer)
    try:
        runner.begin(samples)
        while _settled(loop, runner).left:
            asked, runner.asked = runner.asked, []
            for answers in _answered(engine, asked):
                for id, answer in answers:
                    runner.answer(id, answer)
                _settled(loop, runner)
                ended, runner.ended = runner.ended, []
                yield ended
    finally:
        runner.close()


def _answered(engine: Generates, asked: Sequence[GenerateRequest]) -> Iterator[Answers]:
    """What the engine makes of requests: completions as they come, and why it refuses the others."""
    left = {request.request_id: request for request in asked}
    while left:
        try:
            for completions in engine(list(left.values())):
                for completion in completions:
                    del left[completion.request_id]
                yield [(completion.request_id, completion) for completion in completions]
            if left:
                lost = ", ".join("/".join(map(str, id)) for id in left)
                raise EngineError(f"the engine gave fewer samples than asked: without those of requests {lost}")
        except RequestRefused as refused:
            for id in refused.refused:
                del left[id]
            yield [(id, RequestRefused({id: why})) for id, why in refused.refused.items()]


def _settled(loop: asyncio.AbstractEventLoop, runner: Runner) -> Runner:
    """Let the samples go on until all of them wait for the engine."""
    while runner.at_work:
        loop.call_soon(loop.stop)
        loop.run_forever()
    return runner


def _no_tokenizer() -> None:
    raise NotImplementedError("a function of ours works on tokens")
