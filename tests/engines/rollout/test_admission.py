"""Requests that wait until there is room for their tokens, on a real engine."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cairn.engines.rollout.admission import Admission
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.errors import EngineError, RequestRefused
from cairn.engines.types.types import FinishReason, GenerateRequest, RequestId, SamplingParams, Stream
from tests.requests import by_id

TOKENS = 3 + 20
"""Of a request below."""


def requests(sample: int, count: int, ids: Sequence[int] = (20, 21, 22), tokens: int = 20) -> list[GenerateRequest]:
    """Of one sample of a group."""
    return [
        GenerateRequest((0, sample, call), ids, 100 * sample + call, SamplingParams(tokens)) for call in range(count)
    ]


class Noted:
    """A stream, and what it is given in which order."""

    def __init__(self, stream: Stream, inputs: list[RequestId]) -> None:
        self._stream, self._given = stream, inputs

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._given += [request.request_id for request in requests]
        self._stream.submit(requests)

    def __next__(self) -> Any:
        return next(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def bits(streamed: Iterable[Any]) -> dict[RequestId, Any]:
    return {id: (one.response_ids.tobytes(), one.log_probs.tobytes()) for id, one in by_id(streamed).items()}


def test_no_more_tokens_are_with_the_engine_than_may_be_and_samples_are_the_same(qwen3: TransformersEngine) -> None:
    admission = Admission(5 * TOKENS)
    requested = [one for sample in range(12) for one in requests(sample, 2)]
    stream = admission.open(qwen3.open())
    stream.submit(requested)
    assert bits(stream) == bits(qwen3.generate(requested))
    assert admission.usage() == {"tokens_in_flight_max": 5 * TOKENS}
    assert qwen3.usage()["running_requests_max"] == 24, "without it all are decoded together"


def test_samples_take_turns_whatever_one_of_them_asks_for(qwen3: TransformersEngine) -> None:
    inputs: list[RequestId] = []
    stream = Admission(2 * TOKENS).open(Noted(qwen3.open(), inputs))
    stream.submit([*requests(0, 5), *requests(1, 2)])
    stream.submit(requests(2, 1))
    by_id(stream)
    assert inputs == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (0, 2, 0), (0, 0, 2), (0, 0, 3), (0, 0, 4)]


def test_a_request_above_the_bound_is_served_alone_and_nothing_small_is_let_past_it(qwen3: TransformersEngine) -> None:
    inputs: list[RequestId] = []
    admission = Admission(TOKENS)
    stream = admission.open(Noted(qwen3.open(), inputs))
    stream.submit([*requests(0, 1, tokens=5), *requests(1, 1, tokens=60), *requests(2, 1, tokens=5)])
    result = by_id(stream)
    assert inputs == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    assert len(result[0, 1, 0].response_ids) > 20
    assert admission.usage() == {"tokens_in_flight_max": 3 + 60}


def test_what_cannot_be_served_is_told_in_its_turn_and_leaves_room_for_the_others(qwen3: TransformersEngine) -> None:
    stream = Admission(TOKENS).open(qwen3.open())
    stream.submit([*requests(0, 1), *requests(1, 1, ids=[10**6]), *requests(2, 1)])
    result, refused = set[RequestId](), dict[RequestId, str]()
    while True:
        try:
            result |= {one.request_id for one in next(stream)}
        except RequestRefused as some:
            refused |= some.refused
        except StopIteration:
            break
    assert result == {(0, 0, 0), (0, 2, 0)}
    assert "vocabulary" in refused[0, 1, 0]


def test_two_streams_share_the_room_and_what_is_closed_gives_it_back(qwen3: TransformersEngine) -> None:
    admission = Admission(TOKENS)
    first, second = admission.open(qwen3.open()), admission.open(qwen3.open())
    first.submit(requests(0, 3))
    second.submit(requests(1, 2))
    result: list[dict[RequestId, Any]] = []
    reading = threading.Thread(target=lambda: result.append(by_id(second)))
    reading.start()  # it has nothing with the engine, and waits
    next(first)
    first.close()
    reading.join(60)
    assert not reading.is_alive()
    assert result[0].keys() == {(0, 1, 0), (0, 1, 1)}
    assert admission.usage() == {"tokens_in_flight_max": TOKENS}


def test_an_abort_ends_what_waits_too(qwen3: TransformersEngine) -> None:
    stream = Admission(TOKENS).open(qwen3.open())
    stream.submit(requests(0, 50))
    stream.abort()
    result = by_id(stream)
    assert [one.finish_reason for one in result.values()] == [FinishReason.ABORT] * 50


def test_an_engine_that_does_not_serve_is_the_error_of_the_stream(qwen3: TransformersEngine) -> None:
    stream = Admission(TOKENS).open(qwen3.open())
    stream.submit(requests(0, 2))
    next(stream)
    version = qwen3.get_weight_version()
    assert version is not None
    stream.close()
    qwen3.begin_weight_update(version)
    try:
        late = Admission(TOKENS).open(qwen3.open())
        late.submit(requests(0, 2))
        with pytest.raises(EngineError, match="weight update"):
            next(late)
    finally:
        qwen3.update_weights_from_disk(Path(qwen3.health()["model"]))
        qwen3.end_weight_update()
