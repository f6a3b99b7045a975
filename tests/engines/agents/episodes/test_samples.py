"""What a sample asks while others are decoded joins them, and whatever joins when, each comes out the same."""

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.agents.episodes.user_code import GenerateFunction, UserCode
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleRequest
from cairn.engines.types.types import GenerateRequest, SamplingParams, Stream
from tests.engines.agents.episodes import agents
from tests.engines.agents.episodes.looped import stepped
from tests.engines.rollout.models import rollout_config
from tests.waiting import wait_for

PARAMS = SamplingParams(max_new_tokens=60)
SEARCH = (str(Path(__file__).parents[4]), *sys.path)
BLOCKED = "generate: LoopBlocked: it blocked all other samples for longer than 1 s: await slow calls in it"
Way = Callable[
    [SampleEngine, Callable[[], Stream], Sequence[SampleRequest]], Iterator[list[GeneratedSample] | Recorded]
]


def users(name: str = "turns", timeout: float = 60.0) -> GenerateFunction:
    return GenerateFunction(f"tests.engines.agents.episodes.agents.{name}", SEARCH, timeout=timeout)


def as_ours(
    engine: SampleEngine, open: Callable[[], Stream], samples: Sequence[SampleRequest]
) -> Iterator[list[GeneratedSample]]:
    with closing(open()) as stream:
        yield from stepped(stream, samples, PARAMS, agents.turns)


def as_users(
    engine: SampleEngine, open: Callable[[], Stream], samples: Sequence[SampleRequest]
) -> Iterator[list[GeneratedSample] | Recorded]:
    yield from engine.generate(samples, PARAMS, users())


@pytest.fixture(params=[as_ours, as_users])
def way(request: pytest.FixtureRequest) -> Way:
    way: Way = request.param
    return way


def asked(*turns: Sequence[int], seed: int = 0) -> list[SampleRequest]:
    """A group whose samples have so many tokens in each turn."""
    return [
        SampleRequest(0, index, [20, 21, 22], 1000 * seed + index, metadata={"turns": list(one)})
        for index, one in enumerate(turns)
    ]


def bits(sample: GeneratedSample) -> tuple[Any, ...]:
    trajectory = sample.trajectory
    calls = [(segment.call, segment.seed, len(segment)) for segment in trajectory.segments]
    return calls, trajectory.response_ids.tobytes(), trajectory.log_probs.tobytes(), sample.finish_reason, sample.error


def all_of(stream: Iterator[list[GeneratedSample] | Recorded]) -> dict[tuple[int, int], GeneratedSample]:
    """In the order in which they end."""
    return {sample.key: sample for part in stream if isinstance(part, list) for sample in part}


class Submitted:
    """A stream that notes how many tokens each request goes on from."""

    def __init__(self, stream: Stream, noted: list[int]) -> None:
        self._stream, self._noted = stream, noted

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._stream.submit(requests)
        self._noted += [len(request.input_ids) for request in requests]

    def __next__(self) -> Any:
        return next(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def test_a_later_turn_begins_while_another_sample_is_still_decoded(model_folders: dict[str, str], way: Way) -> None:
    engine = TransformersEngine(model_folders["qwen3"], rollout_config())
    turns, steps, step = list[int](), 0, engine._decoder.step

    def waiting_for_the_later_turns(*inputs: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps in (6, 16):  # the turns before have ended
            wait_for(lambda: len(turns) >= 3 + steps // 16, seconds=30)
        return step(*inputs)

    engine._decoder.step = waiting_for_the_later_turns  # type: ignore[method-assign]

    def open() -> Any:
        return Submitted(engine.open(), turns)

    result = all_of(way(SampleEngine(open, engine.abort), open, asked([50], [4, 4, 4])))
    assert [(key, sample.error) for key, sample in result.items()] == [((0, 1), None), ((0, 0), None)]
    assert turns == [3, 3, 3 + 4 + 3, 3 + 4 + 3 + 4 + 3]
    assert steps == len(result[0, 0].trajectory.response_ids) > 20, "no turn took a step of its own"


@pytest.mark.parametrize("seed", range(2))
def test_turns_that_join_others_are_bit_for_bit_those_of_a_sample_alone(
    seed: int, model_folders: dict[str, str], way: Way
) -> None:
    draw = random.Random(seed)
    samples = asked(*([draw.randrange(1, 20) for _ in range(draw.randrange(1, 5))] for _ in range(17)), seed=seed)
    alone = TransformersEngine(model_folders["qwen3"], rollout_config(max_running_requests=1))
    expected: dict[tuple[int, int], Any] = {}
    for sample in samples:
        expected |= all_of(as_ours(SampleEngine(alone.open, alone.abort), alone.open, [sample]))
    engine = TransformersEngine(model_folders["qwen3"], rollout_config(max_running_requests=draw.choice([5, 7, 40])))
    result = all_of(way(SampleEngine(engine.open, engine.abort), engine.open, draw.sample(samples, len(samples))))
    assert result.keys() == expected.keys()
    assert [key for key, sample in result.items() if bits(sample) != bits(expected[key])] == []


def test_user_code_has_a_process_that_stays_for_the_next_call_of_the_function(qwen3: TransformersEngine) -> None:
    engine = SampleEngine(qwen3.open, qwen3.abort)

    def processes(function: GenerateFunction) -> set[str | None]:
        return {sample.error for sample in all_of(engine.generate(asked([1], [1]), PARAMS, function)).values()}

    (first,) = processes(users("tells_its_process"))
    assert processes(users("tells_its_process")) == {first}
    given_up = engine.generate(asked([1], [50]), PARAMS, users())
    next(given_up)
    given_up.close()
    (second,) = processes(users("tells_its_process"))
    assert second != first


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("waits", "generate: GenerateTimeout: it took longer than 1 s outside the engine"),
        ("keeps_the_lock", BLOCKED),
        pytest.param("asks_a_tool_that_keeps_the_lock", BLOCKED, marks=pytest.mark.proof),
        pytest.param("keeps_the_lock_in_an_executor", BLOCKED, marks=pytest.mark.proof),
        pytest.param("sleeps", BLOCKED, marks=pytest.mark.proof),
        pytest.param("asks_a_tool_that_stalls", BLOCKED, marks=pytest.mark.proof),
    ],
)
def test_a_sample_whose_code_hangs_fails_alone(qwen3: TransformersEngine, function: str, told: str) -> None:
    engine = SampleEngine(qwen3.open, qwen3.abort)
    samples = asked([3], [2, 4], [5])
    expected = all_of(as_ours(engine, qwen3.open, samples))
    result = all_of(engine.generate(samples, PARAMS, users(function, timeout=1)))
    assert result.pop((0, 0)).error == told
    assert {key: bits(sample) for key, sample in result.items()} == {key: bits(expected[key]) for key in result}
    assert result.keys() == {(0, 1), (0, 2)}


@pytest.mark.proof
@pytest.mark.parametrize("turns", [([3],), ([3], [3])])
def test_a_sample_whose_code_hangs_at_its_end_keeps_no_call_from_ending(
    qwen3: TransformersEngine, turns: tuple[list[int], ...]
) -> None:
    engine = SampleEngine(qwen3.open, qwen3.abort)
    expected = all_of(as_ours(engine, qwen3.open, asked(*turns)))
    result = all_of(engine.generate(asked(*turns), PARAMS, users("keeps_the_lock_at_its_end", timeout=10)))
    assert result.keys() == expected.keys()
    assert bits(result[0, 0]) == bits(expected[0, 0])


@pytest.mark.slow
def test_the_time_in_which_tools_of_others_are_at_work_is_not_a_samples_own(qwen3: TransformersEngine) -> None:
    engine = SampleEngine(qwen3.open, qwen3.abort)
    result = all_of(engine.generate(asked(*[[1]] * 16), PARAMS, users("computes", timeout=2)))
    assert [sample.error for sample in result.values()] == [None] * 16


def test_the_process_of_user_code_is_killed_once_for_its_number_may_then_be_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed, killpg = [], os.killpg

    def note_and_kill(group: int, signum: int) -> None:
        killed.append(group)
        killpg(group, signum)

    monkeypatch.setattr(os, "killpg", note_and_kill)
    user_code = UserCode(users())
    process = user_code._child._process
    user_code.kill()
    user_code.kill()
    del user_code
    gc.collect()
    assert (process.returncode, killed.count(process.pid)) == (-signal.SIGKILL, 1)
