"""Samples by any function, in the thread that reads them: what a process of user code does, without the process."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cairn.engines.agents.episodes.in_process import InProcessGeneration, OpenRequests
from cairn.engines.agents.episodes.runner import Generate, Runner
from cairn.engines.types.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types.types import SamplingParams, Stream


def stepped(
    stream: Stream, samples: Sequence[SampleRequest], params: SamplingParams, function: Generate
) -> Iterator[list[GeneratedSample]]:
    """Generate samples without an event loop, as for a built-in function."""
    return InProcessGeneration(stream, params, function).generate(samples)


def looped(
    stream: Stream,
    samples: Sequence[SampleRequest],
    params: SamplingParams,
    function: Generate,
    tokenizer: Callable[[], Any] = lambda: None,
) -> Iterator[list[GeneratedSample]]:
    """Generate samples; yield each as it ends. Nobody makes anything of what is recorded."""
    loop = asyncio.new_event_loop()
    runner, asking = Runner(loop, function, params, tokenizer), OpenRequests(stream)

    def settle() -> list[GeneratedSample]:
        """Let samples go on until all of them wait for the engine."""
        while runner.is_busy or runner.requests:
            while runner.is_busy:
                loop.call_soon(loop.stop)
                loop.run_forever()
            requests, runner.requests = runner.requests, []
            for id, answer in asking.submit(requests):
                runner.answer(id, answer)
        runner.recorded()
        ended, runner.ended = runner.ended, []
        return ended

    try:
        runner.begin(samples)
        while (ended := settle()) or runner.left:
            if ended:
                yield ended
            for id, answer in asking.answers() if runner.left else ():
                runner.answer(id, answer)
    finally:
        runner.close()
