"""Who waits for whom follows from the times of the commits; the arithmetic is done by hand in each test."""

from pathlib import Path
from typing import Any

import pytest

from cairn.configs.loader import options
from cairn.configs.schema.run import RunConfig
from cairn.flows.reading.balance import HINTS, LEAST, WINDOW, Balance, Bottleneck, iteration_waits, measured
from cairn.flows.reading.metrics import find_metric
from cairn.flows.watching.alarms import MetricHistory
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from tests.flows.written_runs import config_of, new_run, recorded_reads, write_iteration

ITERATIONS = 6
LAGGED: dict[str, Any] = {"rollout": {"pipeline": "lagged"}, "algorithm": {"use_tis": True}}
Times = dict[str, tuple[float, float]]
"""Seconds in which steps start and end, by step or by step and shard, from an iteration's start."""
IN_TURN: Times = {
    "rollout.00-000": (0, 60),
    "rollout.00-001": (0, 40),
    "reward.00-000": (60, 65),
    "reward.00-001": (60, 65),
    "filter": (65, 66),
    "advantage": (66, 68),
    "train": (70, 94),
    "checkpoint": (94, 96),
    "sync": (96, 100),
    "eval": (96, 100),
}
SIDE_BY_SIDE: Times = {
    "rollout": (0, 50),
    "reward": (50, 54),
    "filter": (54, 55),
    "advantage": (60, 61),
    "train": (61, 105),
    "checkpoint": (105, 108),
    "sync": (108, 118),
}
"""Every 60 s: an iteration is learned from in 60 to 118, while the next one is collected in 60 to 115."""


def at(ledger: Ledger, iteration: int, start: float, times: Times, epoch: int = 1) -> None:
    """Write an iteration like the first one, whose steps have these times, under this driver."""
    for commit in ledger.commits(0) if iteration else write_iteration(ledger, 0):
        begin, end = times.get(f"{commit.step}.{commit.shard}") or times[commit.step]
        timed = {"started_at": start + begin, "committed_at": start + end, "epoch": epoch}
        timed |= {"iteration": iteration, "inputs": {}}
        path = layout.commit(ledger.run, iteration, commit.step, commit.shard)
        ledger.store.write(path, commit.model_copy(update=timed).to_bytes())


def run_of(path: Path, period: float, times: Times, iterations: int = ITERATIONS, **sections: Any) -> Ledger:
    """A run with a checkpoint in every iteration, one of which begins every `period` seconds."""
    sections["rollout"] = {"num_rollout": 30, **sections.get("rollout", {})}
    ledger = new_run(
        str(path), **{"checkpoint": {"save_interval": 1}, "eval": {"eval_interval": None, "benchmarks": []}, **sections}
    )
    for iteration in range(iterations):
        at(ledger, iteration, 1000 + iteration * period, times)
    return ledger


def of(ledger: Ledger, complete: int = ITERATIONS) -> Balance:
    found = measured(ledger, config_of(ledger), complete)
    assert found is not None
    return found


def sentence(ledger: Ledger) -> str:
    return of(ledger).sentence(config_of(ledger))


def test_in_turn_each_side_waits_for_the_other_and_for_neither(tmp_path: Path) -> None:
    balance = of(run_of(tmp_path, 100, IN_TURN))
    assert (balance.first, balance.last, balance.seconds) == (1, 5, 500)
    assert balance.rollout_wait == pytest.approx(0.5)  # one engine works 60 s of 100, the other 40
    assert balance.trainer_wait == pytest.approx(0.7)  # it works from 70 to 100
    assert balance.neither == pytest.approx(0.1)  # 60 to 70
    assert balance.engines_apart == pytest.approx(0.1)
    assert balance.steps[Step.CHECKPOINT] == pytest.approx(0.02)
    assert balance.bottleneck is Bottleneck.ROLLOUT
    assert balance.overlap == pytest.approx((66 + 32) / 66)  # collected in 0 to 66, learned in 66 to 68 and 70 to 100


def test_side_by_side_what_the_other_half_does_meanwhile_is_no_wait(tmp_path: Path) -> None:
    balance = of(run_of(tmp_path, 60, SIDE_BY_SIDE, **LAGGED))
    assert (balance.first, balance.last, balance.seconds) == (2, 4, 180)  # of 5, all that was done beside is not known
    assert balance.rollout_wait == pytest.approx(10 / 60)
    assert balance.trainer_wait == pytest.approx(3 / 60)
    assert balance.neither == pytest.approx(2 / 60)  # 58 to 60
    assert (balance.bottleneck, balance.overlap) == (Bottleneck.TRAINER, 1)


def test_an_evaluation_is_work_of_every_engine(tmp_path: Path) -> None:
    benchmark = {"name": "heldout", "path": "test.jsonl", "max_response_len": 8}
    evaluated = {"eval_interval": 1, "skip_eval_before_train": True, "benchmarks": [benchmark]}
    balance = of(run_of(tmp_path, 120, {**IN_TURN, "eval": (100, 120)}, eval=evaluated))
    assert balance.rollout_wait == pytest.approx(1 - (50 + 20) / 120)


def test_the_time_between_two_drivers_is_nobodys_wait(tmp_path: Path) -> None:
    ledger = run_of(tmp_path, 100, IN_TURN, iterations=3)
    for iteration in range(3, ITERATIONS):
        at(ledger, iteration, 50_000 + iteration * 100, IN_TURN, epoch=2)
    balance = of(ledger)
    assert (balance.seconds, balance.trainer_wait) == (pytest.approx(500), pytest.approx(0.7))


def test_graders_and_the_driver_can_be_what_both_sides_wait_for(tmp_path: Path) -> None:
    graded = {**IN_TURN, "reward.00-000": (60, 165), "reward.00-001": (60, 165), "filter": (165, 166)}
    late = {step: (105 + start, 105 + end) for step, (start, end) in IN_TURN.items() if "." not in step}
    slow = run_of(tmp_path / "graders", 210, {**late, **graded})
    assert of(slow).bottleneck is Bottleneck.GRADERS
    assert of(slow).hints == ("reward.num_workers",)
    idle = run_of(tmp_path / "driver", 300, IN_TURN)
    assert of(idle).bottleneck is Bottleneck.DRIVER


def test_too_few_iterations_say_nothing_and_the_first_does_not_count(tmp_path: Path) -> None:
    ledger = run_of(tmp_path, 100, IN_TURN, iterations=LEAST + 1)
    config = config_of(ledger)
    assert measured(ledger, config, LEAST) is None
    assert of(ledger, LEAST + 1).first == 1


def test_measuring_reads_no_more_of_a_longer_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = run_of(tmp_path, 100, IN_TURN, iterations=WINDOW + 2)
    reads = recorded_reads(monkeypatch)

    def cost(complete: int) -> int:
        reads.clear()
        assert of(ledger, complete).first == complete - WINDOW
        return len(reads)

    assert cost(WINDOW + 1) == cost(WINDOW + 2) == (WINDOW + 1) * 9  # commits of an iteration


def test_an_iterations_metrics_hold_its_waits(tmp_path: Path) -> None:
    ledger = run_of(tmp_path / "sync", 100, IN_TURN, iterations=3)
    history = MetricHistory(ledger, config_of(ledger))
    assert not [name for name in history.metrics(0, ledger.commits(0)) if "_wait" in name]
    for iteration in (1, 2):  # the one before is remembered, or read
        metrics = history.metrics(iteration, ledger.commits(iteration))
        assert (metrics["perf/train_wait_time"], metrics["perf/wait_time_ratio"]) == pytest.approx((70, 0.7))
        assert metrics["perf/rollout_wait_time"] == pytest.approx(50)
        assert metrics["perf/rollout_wait_time_ratio"] == pytest.approx(0.5)


def test_an_iterations_waits_of_a_lagged_run_are_of_its_own_half(tmp_path: Path) -> None:
    ledger = run_of(tmp_path, 60, SIDE_BY_SIDE, iterations=4, **LAGGED)
    waits = iteration_waits(ledger.commits(3), [*ledger.commits(1), *ledger.commits(2)], config_of(ledger))
    assert [name for name in waits if (found := find_metric(name)) is None or found.source != "waits"] == []
    assert waits["perf/train_wait_time"] == pytest.approx(3)
    assert waits["perf/rollout_wait_time"] == pytest.approx(10)


def test_rollout_in_turn_says_what_overlapping_gives_and_which_options_matter(tmp_path: Path) -> None:
    ledger = run_of(tmp_path, 100, {**IN_TURN, "rollout.00-001": (0, 59)})
    assert sentence(ledger) == (
        "the trainer waits 70 % of the time, the rollout engines 40 %: rollout is the bottleneck; with "
        "rollout.pipeline sync each side waits while the other works, lagged overlaps them: iterations 1.48 times as "
        "fast at best; see rollout.num_engines, rollout.max_running_requests, rollout.partial_rollout"
    )


def test_sides_that_share_gpus_are_not_told_to_overlap(tmp_path: Path) -> None:
    shared = {
        "fleet": {"colocate": True},
        "training": {"num_gpus_per_rank": 1, "world_size": 2},
        "rollout": {"num_gpus_per_engine": 1},
    }
    text = sentence(run_of(tmp_path, 100, {**IN_TURN, "rollout.00-001": (0, 59)}, **shared))
    assert "lagged" not in text
    assert "share GPUs" in text


def test_every_hint_is_an_option() -> None:
    names = {option.name for option in options(RunConfig)}
    assert {hint for hints in HINTS.values() for hint in hints} <= names


def test_sides_that_hardly_wait_are_balanced(tmp_path: Path) -> None:
    ledger = run_of(tmp_path, 60, {**SIDE_BY_SIDE, "rollout": (0, 55), "reward": (55, 55)}, **LAGGED)
    assert of(ledger).hints == ()
    assert sentence(ledger).endswith(": balanced")
