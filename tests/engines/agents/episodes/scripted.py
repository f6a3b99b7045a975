"""Episodes through the runner whose policy needs no model: of a call's seed it says always the same."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cairn.engines.agents.episodes.runner import Generate, Runner
from cairn.engines.agents.episodes.watchdog import Watchdog
from cairn.engines.types.trajectories import NEVER, CallRecord, GeneratedSample, Origin, SampleRequest
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest, SamplingParams

PARAMS = SamplingParams(max_new_tokens=4)


def asked(recorded: Sequence[CallRecord] = (), count: int = 1) -> list[SampleRequest]:
    """Samples, with what is recorded of each."""
    return [
        SampleRequest(
            3,
            index,
            [1, 2, 3],
            100 + index,
            origin=Origin("run", 0),
            recorded=tuple(r for r in recorded if r.index == index),
        )
        for index in range(count)
    ]


def played(
    generate: Generate,
    samples: Sequence[SampleRequest],
    *,
    abort: Callable[[CallRecord], bool] = lambda record: False,
    lost: Callable[[CallRecord], bool] = lambda record: False,
    timeout: float = 5.0,
) -> tuple[list[GeneratedSample], list[CallRecord]]:
    """What comes of samples, and all that is recorded, durable at once. `abort`: whether all are given up when this
    has been recorded, before it is said to be durable. `lost`: whether the log breaks at this, so that it never is."""
    loop = asyncio.new_event_loop()
    runner = Runner(loop, generate, PARAMS, lambda: None)
    ended, records = list[GeneratedSample](), list[CallRecord]()

    async def play() -> None:
        runner.begin(samples)
        with Watchdog(loop, runner, samples, timeout, None, lambda hung: None) as watchdog:
            while runner.left or runner.ended:
                await runner.changed()
                requests, runner.requests = runner.requests, []
                for request in requests:
                    watchdog.restart(request.request_id[:2])
                    runner.answer(request.request_id, _said(request))
                if (recorded := runner.recorded()) is not None:
                    records.extend(recorded.records)
                    if any(map(abort, recorded.records)):
                        runner.abort()
                    if recorded.awaited:
                        runner.acknowledge(NEVER if any(map(lost, recorded.records)) else recorded.number)
                ended.extend(runner.ended)
                runner.ended.clear()

    loop.run_until_complete(asyncio.wait_for(play(), 60))
    runner.close()
    return sorted(ended, key=lambda sample: sample.key), records


def _said(request: GenerateRequest) -> Completion:
    draw, length = random.Random(request.seed), request.sampling_params.max_new_tokens
    return Completion(
        request_id=request.request_id,
        response_ids=np.array([draw.randrange(10, 99) for _ in range(length)], np.int32),
        log_probs=np.zeros(length, np.float32),
        weight_versions=np.zeros(length, np.int32),
        finish_reason=FinishReason.STOP,
        seconds=0.0,
    )


def ids(sample: GeneratedSample) -> list[Any]:
    """Of what it went through."""
    assert sample.error is None
    return [one.response_ids.tolist() for one in sample.trajectories]
