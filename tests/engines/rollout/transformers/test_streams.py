"""Requests join at any time, from anybody, and each asker gets what is its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.errors import EngineError, GenerationFailed, RequestRefused
from cairn.engines.types.types import FinishReason, GenerateRequest, Stream
from tests.engines.rollout.models import Samples, collect, random_requests, request, rollout_config, same
from tests.requests import by_id
from tests.waiting import wait_for

LONG = 100


def submitted(engine: TransformersEngine, requests: Sequence[GenerateRequest]) -> Stream:
    stream = engine.open()
    stream.submit(requests)
    return stream


def within_steps(engine: TransformersEngine, act: Callable[[], None]) -> None:
    """Do something in every step of the engine's, while it is taken."""
    step = engine._decoder.step

    def acting(*inputs: Any) -> torch.Tensor:
        act()
        return step(*inputs)

    engine._decoder.step = acting


def turns(requests: Sequence[GenerateRequest], expected: Samples) -> list[GenerateRequest]:
    """What a conversation asks for next: after the whole of what it said and was told."""
    draw = np.random.default_rng(0)
    return [
        GenerateRequest(
            (100, *one.request_id),
            [*one.input_ids, *expected[one.request_id].response_ids.tolist(), 5, 6],
            int(draw.integers(2**63)),
            one.sampling_params,
        )
        for one in requests
    ]


@pytest.mark.parametrize("seed", range(3))
def test_samples_that_join_others_midway_are_bit_for_bit_those_that_start_alone(
    seed: int, model_folders: dict[str, str]
) -> None:
    engine = TransformersEngine(model_folders["qwen3"], rollout_config(max_running_requests=23))
    first = [one for one in random_requests(seed=50 + seed, count=12) if len(one.input_ids) < 60]
    expected = {one.request_id: collect(engine, [one])[one.request_id] for one in first}
    later = turns(first[::2], expected)
    expected |= {one.request_id: collect(engine, [one])[one.request_id] for one in later}

    waiting = [*first, *later]
    stream, draw = engine.open(), np.random.default_rng(seed)

    def join() -> None:
        count = int(draw.integers(4))
        stream.submit(waiting[:count])
        del waiting[:count]

    within_steps(engine, join)
    while waiting:
        collect(engine, request(7, [1, 2, 3], max_new_tokens=LONG))
    actual = by_id(stream)
    assert actual.keys() == expected.keys()
    assert [id for id, sample in actual.items() if not same(sample, expected[id])] == []


def test_a_stream_goes_on_with_what_is_asked_while_it_is_read(qwen3: TransformersEngine) -> None:
    groups = [request(i, [1, 2 + i], samples=2, max_new_tokens=20) for i in range(4)]
    expected = {id: sample for group in groups for id, sample in collect(qwen3, group).items()}
    stream, actual = submitted(qwen3, groups[0]), Samples()
    for later in [*groups[1:], []]:
        actual |= by_id([next(stream)])
        stream.submit(later)
    actual |= by_id(stream)
    assert list(stream) == []
    stream.submit(groups[0])
    actual |= by_id(stream)
    assert actual.keys() == expected.keys()
    assert all(same(actual[id], sample) for id, sample in expected.items())


def test_threads_that_generate_at_the_same_time_get_what_each_asked_for(model_folders: dict[str, str]) -> None:
    engine = TransformersEngine(model_folders["qwen3"], rollout_config(max_running_requests=16))
    requested = [random_requests(seed=seed, count=6) for seed in range(4)]
    expected = [collect(engine, requests) for requests in requested]
    with ThreadPoolExecutor(len(requested)) as pool:
        actual = list(pool.map(lambda requests: collect(engine, requests), requested))
    for mine, alone in zip(actual, expected, strict=True):
        assert mine.keys() == alone.keys()
        assert all(same(mine[id], alone[id]) for id in alone)
    assert engine.health()["running_requests"] == 0


def test_aborting_a_stream_leaves_the_others_alone(model_folders: dict[str, str]) -> None:
    engine = TransformersEngine(model_folders["qwen3"], rollout_config(max_running_requests=6))
    requested = [request(i, [4, 5 + i], samples=5, max_new_tokens=LONG) for i in range(2)]
    expected = collect(engine, requested[0] + requested[1])
    steps = 0

    def abort() -> None:
        nonlocal steps
        steps += 1
        if steps == 10:
            streams[1].abort()

    streams = [submitted(engine, requests) for requests in requested]
    within_steps(engine, abort)
    assert all(same(sample, expected[id]) for id, sample in by_id(streams[0]).items())
    aborted = by_id(streams[1])
    assert {sample.finish_reason for sample in aborted.values()} == {FinishReason.ABORT}
    assert sorted({len(sample.response_ids) for sample in aborted.values()}) == [0, 10], "some waited, one had begun"
    assert all(
        sample.log_probs.tobytes() == expected[id].log_probs[: len(sample.log_probs)].tobytes()
        for id, sample in aborted.items()
    )
    streams[1].submit(request(9, [1]))
    (late,) = by_id(streams[1]).values()
    assert (late.finish_reason, len(late.response_ids)) == (FinishReason.ABORT, 0)
    streams[0].submit(request(9, [1]))
    assert len(by_id(streams[0])) == 1


def test_what_is_given_up_makes_room_at_once_and_what_others_asked_for_holds_an_update_up(
    qwen3: TransformersEngine,
) -> None:
    mine = submitted(qwen3, request(0, [1], samples=3, max_new_tokens=LONG))
    others = submitted(qwen3, request(1, [2], max_new_tokens=LONG))
    mine.close()
    with pytest.raises(EngineError, match="engine is generating: abort that call or wait for it before you update"):
        qwen3.begin_weight_update(1)
    others.close()
    qwen3.begin_weight_update(1)
    with pytest.raises(EngineError, match="between begin and end of a weight update"):
        mine.submit(request(2, [3]))


def test_requests_that_are_refused_disturb_nothing(qwen3: TransformersEngine) -> None:
    good, bad = request(0, [1]), request(1, [])
    expected = collect(qwen3, good)
    stream = submitted(qwen3, good)
    with pytest.raises(RequestRefused, match=r"request 1/0 .* prompt is empty"):
        stream.submit([*request(2, [3]), *bad])
    actual = by_id(stream)
    assert actual.keys() == expected.keys()
    assert same(actual[0, 0], expected[0, 0])


def test_logits_that_are_not_finite_fail_the_stream_they_are_of(model_folders: dict[str, str]) -> None:
    engine = TransformersEngine(model_folders["llama"], rollout_config(max_running_requests=8))
    requests = [one for i in range(8) for one in request(i, [5 + i, 9], samples=3, max_new_tokens=20)]
    expected = collect(engine, requests)
    met = {token for one in requests for token in [*one.input_ids, *expected[one.request_id].response_ids.tolist()]}
    poison = next(token for token in range(20, 320) if token not in met)
    with torch.no_grad():
        engine._model.get_input_embeddings().weight[poison] = torch.nan
    failing = submitted(engine, request(9, [7, poison, 8], samples=2, max_new_tokens=4))
    actual = collect(engine, requests)
    with pytest.raises(GenerationFailed, match=r"logits that are not finite .request 9/"):
        list(failing)
    assert all(same(actual[id], sample) for id, sample in expected.items())


def test_a_step_that_breaks_off_fails_all_that_was_asked_and_nothing_later(qwen3: TransformersEngine) -> None:
    one = request(0, [1, 2], max_new_tokens=5)
    expected = collect(qwen3, one)
    errors: list[BaseException] = [KeyboardInterrupt(), RuntimeError("out of memory")]

    def fail() -> None:
        if errors:
            raise errors.pop()

    within_steps(qwen3, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        collect(qwen3, one)
    with pytest.raises(KeyboardInterrupt):
        collect(qwen3, one)
    assert same(collect(qwen3, one)[0, 0], expected[0, 0])


def test_a_generation_that_nobody_listens_to_ends(qwen3: TransformersEngine) -> None:
    stream = qwen3.generate(request(0, [1], samples=4, max_new_tokens=LONG))
    next(stream, None)
    del stream
    assert qwen3.health()["running_requests"] == 0
    qwen3.begin_weight_update(1)


def test_who_decodes_for_a_stream_that_somebody_else_closes_ends_with_it(qwen3: TransformersEngine) -> None:
    stream, loop = submitted(qwen3, request(0, [60], max_new_tokens=LONG)), qwen3._loop
    deliver, closing = loop._deliver, ThreadPoolExecutor(1)

    def delivered(ended: Any) -> None:
        deliver(ended)
        if ended:  # by the time that the decoding thread looks, the closing one has taken it
            closed.result(60)

    loop._deliver = delivered  # type: ignore[method-assign]
    closed: Future[None] = Future()
    steps = iter(range(LONG))

    def close_at_the_third() -> None:
        nonlocal closed
        if next(steps) == 2:
            closed = closing.submit(stream.close)
            wait_for(lambda: bool(loop._aborting), 60)

    within_steps(qwen3, close_at_the_third)
    with closing, ThreadPoolExecutor(1) as reading:
        assert reading.submit(lambda: list(stream)).result(60) == []


def test_usage_tells_the_most_that_ran_and_waited(model_folders: dict[str, str]) -> None:
    engine = TransformersEngine(model_folders["qwen3"], rollout_config(max_running_requests=6))
    collect(engine, request(0, [1, 2], samples=10))
    assert engine.usage() == {"running_requests_max": 6, "queued_requests_max": 4}
    collect(engine, request(0, [1, 2], samples=2))
    assert engine.usage() == {"running_requests_max": 2, "queued_requests_max": 0}
