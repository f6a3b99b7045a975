"""What makes an engine of requests one of samples: `generate` runs beside it, in its process where it is ours."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from cairn.engines.errors import RequestRefused
from cairn.engines.rollout.runner import Generate, Runner
from cairn.engines.rollout.single_turn import generate as single_turn
from cairn.engines.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types import Completion, GenerateRequest, RequestId, SamplingParams

Answers = list[tuple[RequestId, Completion | RequestRefused]]


class SampleEngine:
    """Generates samples with a rollout engine."""

    def __init__(
        self,
        generate: Callable[[Sequence[GenerateRequest]], Iterator[list[Completion]]],
        abort: Callable[[], None],
    ) -> None:
        """`generate` and `abort` are the engine's."""
        self._generate = generate
        self._abort = abort

    def generate(
        self, samples: Sequence[SampleRequest], params: SamplingParams, function: Generate = single_turn
    ) -> Iterator[list[GeneratedSample]]:
        """Generate samples; yield each as it ends. What is asked while the engine decodes waits until it is done.

        Raises as the engine's `generate` does, but for requests that it refuses: their samples fail. Raises
        BadTrajectory where what a function returned is none.
        """
        loop = asyncio.new_event_loop()
        runner = Runner(loop, function, params, _no_tokenizer)
        try:
            runner.begin(samples)
            while _settled(loop, runner).left:
                asked, runner.asked = runner.asked, []
                for answers in self._answered(asked):
                    for id, answer in answers:
                        runner.answer(id, answer)
                    _settled(loop, runner)
                    ended, runner.ended = runner.ended, []
                    yield ended
        finally:
            runner.close()

    def abort(self) -> None:
        """End the running `generate` soon, from any thread: it yields each unfinished sample as far as it came. Without
        a running one this does nothing."""
        self._abort()

    def _answered(self, asked: Sequence[GenerateRequest]) -> Iterator[Answers]:
        """What the engine makes of requests: completions as they come, and why it refuses the others."""
        left = {request.request_id: request for request in asked}
        while left:
            try:
                for completions in self._generate(list(left.values())):
                    for completion in completions:
                        del left[completion.request_id]
                    yield [(completion.request_id, completion) for completion in completions]
                return
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
