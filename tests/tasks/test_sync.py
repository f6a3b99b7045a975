"""How often the rollout engines are asked: once for all who ask together, anew for whoever comes later."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.configs.schema.operations import RetryConfig
from cairn.engines.errors import EngineDied
from cairn.tasks.context import RunContext, WeightsLock
from cairn.tasks.sync import bring_up_to_date
from tests.waiting import wait_for


class Engines:
    """What of a fleet is asked, counted; the first question waits to be answered."""

    def __init__(self) -> None:
        self.asked = 0
        self.rollout = ["rollout:0", "rollout:1"]
        self.turns = self
        self.answer = threading.Event()
        self.failure: Exception | None = None

    def ensure_rollout_alive(self) -> None:
        self.asked += 1
        assert self.answer.wait(60)
        if self.failure is not None:
            raise self.failure

    def rollout_versions(self) -> list[int]:
        return [0, 0]

    def offload_training(self) -> None:
        pass

    for_rollout = route = offload_training


@pytest.fixture
def run() -> RunContext:
    engines: Any = Engines()
    nothing: Any = None
    config: Any = SimpleNamespace(retry=RetryConfig())
    return RunContext(
        config,
        nothing,
        fleet=lambda: engines,
        tokenizer=nothing,
        data=nothing,
        max_prompt_len=1,
        benchmarks={},
        graders={},
        environment=nothing,
        emit=nothing,
    )


class Counted(WeightsLock):
    """Says how many have come for it."""

    came = 0

    def __enter__(self) -> WeightsLock:
        self.came += 1
        return super().__enter__()


def test_shards_that_ask_together_share_one_answer_and_a_later_one_asks_anew(run: RunContext) -> None:
    engines: Any = run.fleet
    run.weights_lock = lock = Counted()
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(bring_up_to_date, run, None) for _ in range(8)]
        wait_for(lambda: lock.came == 8)
        engines.answer.set()
        assert [call.result(60) for call in calls] == [[0, 0]] * 8
    assert engines.asked == 2, "one for the first, and one for all who came while it was under way"
    bring_up_to_date(run, None)
    assert engines.asked == 3


def test_everybody_asks_anew_after_a_failure(run: RunContext) -> None:
    engines: Any = run.fleet
    run.weights_lock = lock = Counted()
    engines.failure = EngineDied("it is gone")
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(bring_up_to_date, run, None) for _ in range(3)]
        wait_for(lambda: lock.came == 3)
        engines.answer.set()
        for call in calls:
            with pytest.raises(EngineDied):
                call.result(60)
    assert engines.asked == 3


def test_an_answer_is_nobodys_once_others_had_the_engines(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: Any = run.fleet
    engines.answer.set()
    now = [10.0]
    monkeypatch.setattr("cairn.tasks.sync.time", SimpleNamespace(monotonic=lambda: now[0]))
    bring_up_to_date(run, None)
    now[0] = 5.0  # of one that came before that, and waited
    bring_up_to_date(run, None)
    assert engines.asked == 1
    with run.weights_lock:  # as a train step has it
        pass
    bring_up_to_date(run, None)
    assert engines.asked == 2
    now[0] = 10.0
    with run.weights_lock:
        bring_up_to_date(run, None)  # as before a suspect is generated alone, in the same turn
    now[0] = 5.0
    bring_up_to_date(run, None)
    assert engines.asked == 4
