"""The laws of the simulated pipelines, from closed forms."""

from dataclasses import replace

import numpy as np
import pytest

from bench import clusters
from bench.driver_load import READS, Costs
from bench.durable_run import Outcome
from bench.pipeline import seconds_to
from bench.pipeline_sim import PIPELINES, Lengths, Machine, Pipeline, calibrated, log_normal, simulate


def _always(length: int) -> Lengths:
    return lambda chance, count: np.full(count, length)


EVEN = Machine(
    engines=2,
    groups=4,
    group_size=2,
    lengths=_always(100),
    prompt_tokens=0,
    step=0.01,
    step_each=0.001,
    prefill_rate=1e9,
    train_fixed=0.5,
    train_rate=1000,
    update=0.0,
)
"""A rollout of 100 steps of 14 ms, and an update of 1.3 s."""

TAILED = replace(EVEN, engines=4, groups=32, lengths=log_normal(50, 1.0, 2000), step_each=0.0, train_rate=8000)


def test_in_turn_an_iteration_takes_rollout_and_training_and_what_is_beside() -> None:
    found = simulate(replace(EVEN, update=0.2, fixed=0.3), Pipeline(), 5)
    assert found.seconds == pytest.approx(1.4 + 1.3 + 0.2 + 0.3)
    assert found.rollout_idle == pytest.approx(1 - 1.4 / 3.2)
    assert found.train_idle == pytest.approx(1 - 1.5 / 3.2)
    assert found.tokens_per_second == pytest.approx(800 / 3.2)


def test_side_by_side_an_iteration_takes_the_longer_half() -> None:
    found = simulate(EVEN, Pipeline(lag=1), 20)
    assert found.seconds * 20 == pytest.approx(20 * 1.4 + 1.3)


def test_on_cores_that_are_shared_both_sides_are_slower_by_what_is_beside() -> None:
    alone = replace(EVEN, engines=1, fixed=0.3)
    shared = replace(alone, cores=2)
    assert simulate(shared, Pipeline(), 5) == simulate(alone, Pipeline(), 5)
    # A rollout of 1.8 s has (2 - 0.3 / s) / 2 of a core while an iteration takes s: 2 s - 0.3 = 3.6.
    assert simulate(shared, Pipeline(lag=1), 200).seconds == pytest.approx(1.95, rel=0.02)


def test_without_a_tail_a_stream_gains_nothing_over_a_lag() -> None:
    even = replace(EVEN, step=0.0, step_each=0.0035)  # as fast, and no faster where more is decoded at once
    lagged, streaming = (simulate(even, one, 20).seconds for one in (Pipeline(lag=1), Pipeline(max_age=1)))
    assert streaming >= 0.99 * lagged


def test_with_a_tail_streaming_is_faster_than_lagged_and_that_than_in_turn() -> None:
    seconds = {name: simulate(TAILED, one, 20).seconds for name, one in PIPELINES.items()}
    assert seconds["sync"] > 1.1 * seconds["lagged"] > 1.1 * seconds["streaming 2"]
    assert seconds["streaming 2"] >= 0.99 * seconds["streaming 4"]


def test_nothing_is_faster_than_its_trainer() -> None:
    slow = replace(TAILED, train_fixed=100.0)
    found = simulate(slow, Pipeline(max_age=4), 10)
    assert found.seconds > 100
    assert found.train_idle < 20 / 1000  # the first batch is waited for: at most 2,000 steps of 10 ms


def test_rates_are_found_again_in_runs_that_were_made_with_them() -> None:
    chance = np.random.default_rng(0)
    iterations = []
    for _ in range(10):
        lengths = np.rint(chance.lognormal(3, 1, 64)).astype(int) + 1
        seconds = {
            "rollout_seconds": 0.002 * lengths.max() + 1e-4 * lengths.sum(),
            "train_seconds": 0.1 + lengths.sum() / 5000,
        }
        iterations.append({"response_lengths": lengths.tolist(), **seconds})
    whole = sum(one["rollout_seconds"] + one["train_seconds"] + 0.4 for one in iterations)
    run = {"iterations": iterations, "seconds": whole, "sync_seconds": 0.0, "group_size": 8}
    found = calibrated({"sync": [run]})
    assert (found.groups, found.group_size) == (8, 8)
    assert [found.step, found.step_each, found.train_fixed, 1 / found.train_rate, found.fixed] == pytest.approx(
        [0.002, 1e-4, 0.1, 1 / 5000, 0.4]
    )
    assert simulate(found, Pipeline(), 200).seconds == pytest.approx(whole / 10, rel=0.15)


def test_a_score_is_reached_between_two_evaluations() -> None:
    outcome = Outcome(40.0, {}, ends=[10.0, 20.0, 30.0, 40.0], points={2: 0.7, 4: 0.9})
    assert seconds_to(0.80, outcome) == pytest.approx(30)
    assert seconds_to(0.95, outcome) is None


FREE: dict[str, dict[str, float]] = {figure: {"run": 0.0} for figure in READS}


def test_no_iteration_is_shorter_than_the_cpu_time_of_its_driver() -> None:
    free = clusters.predicted(EVEN, 4, 0, Costs(FREE))
    busy = clusters.predicted(EVEN, 4, 0, Costs(FREE | {"CPU seconds": {"shard": 500.0}}))
    assert free.pipelines["sync"].seconds == pytest.approx(1.4 + 1.3)
    assert {round(one.seconds) for one in busy.pipelines.values()} == {1000}
    assert 1000 * (1 - busy.pipelines["sync"].train_idle) == pytest.approx(1.3)
    assert busy.pipelines["sync"].tokens_per_second == pytest.approx(0.8)


def test_the_steps_of_a_driver_after_the_last_reward_lengthen_an_iteration_in_turn() -> None:
    tail = clusters.predicted(EVEN, 4, 0, Costs(FREE | {"tail CPU seconds": {"sample": 0.25}}))
    assert tail.pipelines["sync"].seconds == pytest.approx(1.4 + 1.3 + 8 * 0.25)


def test_the_bytes_and_operations_of_a_version_are_those_of_the_documentation() -> None:
    _, (row,) = clusters.transports(["Qwen3-30B-A3B"])
    assert (round(row["sent"] / 1e9, 1), row["operations"]) == (61.1, 141)  # docs/weights.md
