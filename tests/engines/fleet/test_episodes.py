"""Episodes in workers beside an engine, on a real cluster: the same samples, and what is lost with whom."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest

from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.episodes import EpisodeWorkerHandle
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.errors import EngineDied, GenerationFailed
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleKey, SampleRequest
from cairn.engines.types.types import FinishReason, SamplingParams
from tests.engines.agents.episodes.test_samples import all_of, bits
from tests.engines.training.builders import model_folder
from tests.ray_fixtures import fleet_config
from tests.waiting import wait_for

pytestmark = pytest.mark.proof

PARAMS = SamplingParams(max_new_tokens=60)
SEARCH = (str(Path(__file__).parents[3]), *sys.path)
IN_FLIGHT = 300
WORKERS = 2


def users(name: str, **deadlines: float) -> GenerateFunction:
    return GenerateFunction(f"tests.engines.agents.episodes.agents.{name}", SEARCH, **deadlines)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fleet(model: Path, ray_cluster: Cluster) -> Iterator[Fleet]:
    options = {
        "custom_generate_function_path": "tests.engines.agents.episodes.agents.turns",
        "num_episode_workers": WORKERS,
        "max_tokens_in_flight": IN_FLIGHT,
    }
    with Fleet.start(fleet_config(model, rollout=options), name="episodes", total_steps=1) as fleet:
        yield fleet


@pytest.fixture
def engine(fleet: Fleet) -> RolloutHandle:
    """With all that belongs to it, as a step of a run finds it."""
    for one in fleet.engines:
        one.ensure_alive()
    return fleet.rollout[0]


@pytest.fixture(scope="module")
def alone(model: Path) -> SampleEngine:
    """An engine in this process, with user code beside it."""
    made = TransformersEngine(str(model), fleet_config(model).rollout)
    return SampleEngine(made.open, made.abort)


def asked(count: int, turns: Sequence[int] = (3, 5, 4), **metadata: Any) -> list[SampleRequest]:
    """Groups of four samples, each of as many turns of as many tokens."""
    return [
        SampleRequest(i // 4, i % 4, [20, 21, 22 + i // 4], 7000 + i, metadata={"turns": list(turns), **metadata})
        for i in range(count)
    ]


def workers_of(engine: RolloutHandle) -> Sequence[EpisodeWorkerHandle]:
    assert engine.episodes is not None
    return engine.episodes.workers


def all_bits(result: dict[SampleKey, GeneratedSample]) -> dict[SampleKey, Any]:
    return {key: bits(sample) for key, sample in result.items()}


def begun(file: Path) -> Counter[tuple[int, int]]:
    """How many turns of each sample have begun."""
    lines = file.read_text().splitlines() if file.exists() else []
    return Counter((int(group), int(index)) for group, index, _ in map(str.split, lines))


def test_samples_are_those_of_one_process_and_every_worker_runs_some(
    engine: RolloutHandle, alone: SampleEngine
) -> None:
    samples, ended = asked(64), [worker.health()["ended_episodes"] for worker in workers_of(engine)]
    expected = all_bits(all_of(alone.generate(samples, PARAMS, users("turns"))))
    assert all_bits(all_of(engine.generate_samples(samples, PARAMS, users("turns")))) == expected
    now = [worker.health()["ended_episodes"] for worker in workers_of(engine)]
    assert [after - before for before, after in zip(ended, now, strict=True)] == [32, 32]
    assert IN_FLIGHT - 20 < engine.usage()["tokens_in_flight_max"] <= IN_FLIGHT, "it was full, and not fuller"


def test_a_function_of_ours_runs_in_the_engines_own_process(engine: RolloutHandle) -> None:
    before = [worker.health()["ended_episodes"] for worker in workers_of(engine)]
    assert len(all_of(engine.generate_samples(asked(4), PARAMS, GenerateFunction("single_turn")))) == 4
    assert [worker.health()["ended_episodes"] for worker in workers_of(engine)] == before


def test_a_worker_that_dies_costs_its_own_unfinished_samples_and_nobody_elses(
    engine: RolloutHandle, alone: SampleEngine, tmp_path: Path
) -> None:
    turns, file = [20] * 6, tmp_path / "turns"
    samples = asked(8, turns, file=str(file))
    expected = all_bits(all_of(alone.generate(asked(8, turns, file=os.devnull), PARAMS, users("notes"))))
    dying, other = workers_of(engine)
    pid, told = dying.health()["pid"], list[str]()
    dying.report = told.append
    stream = engine.generate_samples(samples, PARAMS, users("notes"))
    dealt = {worker: {sample.key for sample in samples[i::WORKERS]} for i, worker in enumerate((dying, other))}
    parts = [next(stream)]
    while not isinstance(parts[-1], Recorded) or parts[-1].records[0].key not in dealt[dying]:
        parts.append(next(stream))
    os.kill(pid, signal.SIGKILL)
    parts += stream
    assert all_bits(all_of(iter(parts))) == expected
    times = begun(file)
    assert {times[key] for key in dealt[other]} == {6}
    assert min(times[key] for key in dealt[dying]) > 6
    answered = Counter(
        (record.key, record.call) for part in parts if isinstance(part, Recorded) for record in part.records
    )
    assert set(answered.values()) == {1}, "no turn that was told of is sampled again"
    assert len(answered) == 8 * 6
    assert dying.health()["pid"] != pid
    assert told[0].startswith("Engine episodes:0 is restarted: ")
    assert engine.usage()["episode_worker_restarts"] == 1
    assert engine.usage()["restarts"] == 0


@pytest.mark.slow
def test_a_worker_that_does_not_answer_is_replaced_while_the_other_goes_on(
    engine: RolloutHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.episodes is not None
    hasty = engine.episodes._fleet.model_copy(update={"call_timeout": 2})
    stopped, _ = workers_of(engine)
    process = psutil.Process(stopped.health()["pid"])
    stream = engine.generate_samples(asked(8, [20] * 6), PARAMS, users("turns"))
    first = next(stream)
    monkeypatch.setattr(engine.episodes, "_fleet", hasty)
    process.suspend()
    result = all_of(chain([first], stream))
    assert [sample.error for sample in result.values()] == [None] * 8
    assert not process.is_running()


def test_an_engine_that_dies_is_the_error_that_the_workers_see_and_they_serve_the_next(
    engine: RolloutHandle, alone: SampleEngine
) -> None:
    pids = [worker.health()["pid"] for worker in workers_of(engine)]
    stream = engine.generate_samples(asked(24), PARAMS, users("turns"))
    next(stream)
    os.kill(engine.health()["pid"], signal.SIGKILL)
    with pytest.raises(EngineDied, match="cairn:episodes:rollout:0"):
        all_of(stream)
    engine.ensure_alive()
    expected = all_bits(all_of(alone.generate(asked(8), PARAMS, users("turns"))))
    assert all_bits(all_of(engine.generate_samples(asked(8), PARAMS, users("turns")))) == expected
    assert [worker.health()["pid"] for worker in workers_of(engine)] == pids


def test_user_code_that_ends_its_process_fails_the_generation_and_not_the_worker(engine: RolloutHandle) -> None:
    pids = [worker.health()["pid"] for worker in workers_of(engine)]
    with pytest.raises(GenerationFailed, match="ended with exit code 3"):
        all_of(engine.generate_samples(asked(8), PARAMS, users("ends_its_process")))
    assert [worker.health()["pid"] for worker in workers_of(engine)] == pids
    assert len(all_of(engine.generate_samples(asked(8), PARAMS, users("turns")))) == 8


def test_user_code_that_is_killed_from_outside_goes_on_in_another_process_time_after_time(
    engine: RolloutHandle, alone: SampleEngine, tmp_path: Path
) -> None:
    turns, file = [10] * 12, tmp_path / "turns"
    expected = all_bits(all_of(alone.generate(asked(8, turns, file=os.devnull), PARAMS, users("notes"))))
    health = [worker.health() for worker in workers_of(engine)]
    parts, killed = list[Any](), set[int]()
    for part in engine.generate_samples(asked(8, turns, file=str(file)), PARAMS, users("notes")):
        parts.append(part)
        if len(killed) < 6 and isinstance(part, Recorded):
            group, index = part.records[0].key
            killed |= {kill_user_code(health[(4 * group + index) % WORKERS]["pid"], killed)} - {0}  # who comes further
    assert len(killed) >= 6
    assert all_bits(all_of(iter(parts))) == expected
    answered = Counter(
        (record.key, record.call) for part in parts if isinstance(part, Recorded) for record in part.records
    )
    assert set(answered.values()) == {1}, "no turn that was told of is sampled again"
    assert [worker.health()["pid"] for worker in workers_of(engine)] == [one["pid"] for one in health]


def test_user_code_that_is_killed_from_outside_and_comes_no_further_is_a_death(
    engine: RolloutHandle, tmp_path: Path
) -> None:
    with pytest.raises(EngineDied, match=r"ended from outside \(SIGKILL\) 4 times in a row"):
        all_of(engine.generate_samples(asked(8), PARAMS, users("is_killed")))
    assert len(all_of(engine.generate_samples(asked(8), PARAMS, users("turns")))) == 8


def kill_user_code(worker: int, before: set[int]) -> int:
    """Of a worker; returns the process, 0 where there is none, or the one of before."""
    for process in psutil.Process(worker).children():
        with suppress(psutil.NoSuchProcess):
            if any("user_process import main" in word for word in process.cmdline()) and process.pid not in before:
                process.kill()
                return process.pid
    return 0


def test_an_abort_gives_every_sample_as_far_as_it_came(engine: RolloutHandle) -> None:
    result: dict[SampleKey, GeneratedSample] = {}
    for part in engine.generate_samples(asked(40, [60, 60]), PARAMS, users("turns")):
        if isinstance(part, Recorded):
            continue
        result |= {sample.key: sample for sample in part}
        if part and not any(sample.finish_reason == FinishReason.ABORT for sample in part):
            engine.abort()
    assert len(result) == 40
    assert FinishReason.ABORT in {sample.finish_reason for sample in result.values()}
    assert len(all_of(engine.generate_samples(asked(8), PARAMS, users("turns")))) == 8, "it ends that call alone"


def test_an_engine_is_free_after_episodes_that_were_given_up(engine: RolloutHandle) -> None:
    pids = [worker.health()["pid"] for worker in workers_of(engine)]
    stream = engine.generate_samples(asked(40, [60, 60]), PARAMS, users("turns"))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.health()["running_requests"] == 0
    assert [worker.health()["open_episodes"] for worker in workers_of(engine)] == [0, 0]
    assert [worker.health()["pid"] for worker in workers_of(engine)] == pids


def test_deadlines_end_the_episodes_that_miss_them_and_no_other(engine: RolloutHandle) -> None:
    result = all_of(engine.generate_samples(asked(8), PARAMS, users("waits", timeout=600, episode_timeout=2)))
    late = {key: sample.error for key, sample in result.items() if sample.error is not None}
    told = "generate: EpisodeTimeout: it took longer than 2 s in all"
    assert late == {(0, 0): told, (1, 0): told}
    assert len(result) == 8


def test_an_episode_that_asks_for_much_at_once_keeps_no_other_waiting(engine: RolloutHandle) -> None:
    all_of(engine.generate_samples(asked(2, [1, 1]), PARAMS, users("asks_for_much")))  # each worker has its process
    order = list(all_of(engine.generate_samples(asked(4, [20, 20]), PARAMS, users("asks_for_much"))))
    assert order[-1] == (0, 0)
    assert engine.usage()["tokens_in_flight_max"] <= IN_FLIGHT


def test_workers_are_engines_of_the_fleet_by_name(fleet: Fleet, engine: RolloutHandle) -> None:
    health = fleet.health()
    assert [name for name in health if name.startswith("episodes:")] == ["episodes:0", "episodes:1"]
    wait_for(lambda: engine.health()["running_requests"] == 0)
