"""What a run cost and wasted, held against sums by hand.

The devices of the written runs are two rollout engines of one CPU thread each, and a trainer of two threads.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cairn.configs.schema.run import RunConfig
from cairn.flows.cli import app
from cairn.flows.reading.costs import (
    Waste,
    apart_costs,
    devices,
    driver_seconds,
    evaluation_costs,
    run_costs,
    step_costs,
    wasted,
    with_prices,
)
from cairn.storage.evals import Evaluation, EvaluationKey
from cairn.storage.ledger.commits import Commit, OutputFile, Step
from cairn.storage.ledger.leases import Holder, LeaseState, Outcome
from cairn.storage.ledger.ledger import Ledger
from tests.flows.written_runs import write_iteration, write_run
from tests.storage.builders import ENVIRONMENT


def lease(epoch: int, began: float, ended: float, outcome: Outcome | None) -> LeaseState:
    holder = Holder.this_process().model_copy(update={"pid": 2**22 + 1})
    return LeaseState(
        run="toy", epoch=epoch, holder=holder, acquired_at=began, time_to_live=30, renewed_at=ended, outcome=outcome
    )


def test_each_step_takes_the_devices_it_works_on(commits: list[Commit], config: RunConfig) -> None:
    spent = {
        cost.step: (cost.seconds, cost.device_seconds, cost.tokens)
        for cost in step_costs(commits, lambda commit: config)
    }
    assert spent == {
        Step.ROLLOUT: (6, 6 * 1 + 3 * 1, 2 * (2 + 3) + 2 * 4),  # one engine for 6 s, the other for 3
        Step.REWARD: (1, 0, None),
        Step.FILTER: (1, 0, None),
        Step.ADVANTAGE: (1, 0, None),
        Step.TRAIN: (5, 5 * 2, 28),
        Step.SYNC: (2, 2 * 2, None),
        Step.EVAL: (4, 4 * 2, 3),
    }


def test_shards_that_one_engine_works_on_at_a_time_share_it(commits: list[Commit], config: RunConfig) -> None:
    alone = config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_engines": 1})})
    rollout = next(cost for cost in step_costs(commits, lambda commit: alone) if cost.step is Step.ROLLOUT)
    assert rollout.device_seconds == 6


@pytest.mark.parametrize(
    ("rollout", "training", "colocate", "expected"),
    [
        ({"num_gpus_per_engine": 2}, {"world_size": 4, "num_gpus_per_rank": 1}, False, ("GPU", 4, 4, 8)),
        ({"num_gpus_per_engine": 2}, {"world_size": 4, "num_gpus_per_rank": 1}, True, ("GPU", 4, 4, 4)),
        ({"num_threads": 3}, {"num_threads": 5}, False, ("CPU", 6, 5, 11)),
    ],
)
def test_devices_are_those_that_the_configuration_reserves(
    config: RunConfig, rollout: dict[str, Any], training: dict[str, Any], colocate: bool, expected: tuple[Any, ...]
) -> None:
    changed = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update=rollout),
            "training": config.training.model_copy(update=training),
            "fleet": config.fleet.model_copy(update={"colocate": colocate}),
        }
    )
    used = devices(changed)
    assert (used.kind, used.rollout, used.training, used.reserved) == expected


def test_an_evaluation_is_priced_by_itself(commits: list[Commit], config: RunConfig) -> None:
    (cost,) = with_prices(evaluation_costs(commits, lambda commit: config), 900)
    assert (cost.benchmark, cost.trained, cost.samples, cost.tokens) == ("heldout", 0, 1, 3)
    assert (cost.device_seconds, cost.price) == (8, 2)


def test_evaluations_by_engines_of_their_own_stand_apart(config: RunConfig) -> None:
    key = EvaluationKey(weights="0" * 64, tokenizer="1" * 64, benchmark="gsm8k", settings={})
    made = Evaluation(
        key=key,
        origin={"run": "toy", "iteration": 1, "weight_version": 2},
        attempt="attempt",
        epoch=1,
        outputs=(OutputFile(path="samples.parquet", bytes=1, rows=10, sha256="0" * 64),),
        metrics={"response_len_mean": 7.0},
        started_at=100.0,
        committed_at=130.0,
        environment=ENVIRONMENT.model_copy(update={"threads": 2}),
    )
    others = [
        made.model_copy(update={"adopted": "toy/000001/eval.gsm8k-v000002@0"}),
        made.model_copy(update={"origin": {"run": "another", "iteration": 1}}),
        made.model_copy(update={"origin": {"model": "/models/one"}}),
    ]
    (cost,) = with_prices(apart_costs([made, *others], "toy", config), 60)
    assert (cost.benchmark, cost.trained, cost.samples, cost.tokens) == ("gsm8k", 2, 10, 70)
    assert (cost.seconds, cost.device_seconds, cost.price, cost.apart) == (30, 60, 1, True)


def test_a_drivers_time_is_told_apart(commits: list[Commit]) -> None:
    assert driver_seconds(lease(1, -10, 30, Outcome.FAILED), commits) == (40, 10, 8)
    assert driver_seconds(lease(1, -10, 30, None), commits) == (40, 10, 8)  # it was killed
    assert driver_seconds(lease(1, -10, 30, Outcome.COMPLETED), commits) == (40, 10, 0)
    assert driver_seconds(lease(1, -10, 30, Outcome.FAILED), []) == (40, 40, 0)


def test_waste_is_named_by_its_cause(commits: list[Commit], config: RunConfig) -> None:
    faults: dict[str, dict[str, dict[str, float]]] = {
        "train": {
            "metrics": {"retries/engine_died": 2, "recovery/replayed_steps": 3},
            "timings": {"failed_tries": 5, "retry_wait": 1, "replay": 4},
        },
        "rollout.00-001": {"metrics": {"recovered_groups": 1, "generated_groups": 2}, "timings": {}},
    }
    broken = []
    for commit in commits:
        fault = faults.get(commit.name.partition("/")[2], {"metrics": {}, "timings": {}})
        metrics = {**commit.metrics, **fault["metrics"]}
        broken.append(commit.model_copy(update={"metrics": metrics, "timings": fault["timings"], "epoch": 2}))
    leases = [lease(1, -20, -10, None), lease(2, -5, 22, Outcome.COMPLETED)]
    found = {waste.cause: waste for waste in wasted([broken], leases, lambda commit: config, lambda epoch: config)}
    # Of five groups, by what their rollouts say now, one was dropped; they took 9 device-seconds and 18 tokens.
    assert {cause: (waste.count, waste.device_seconds, waste.tokens) for cause, waste in found.items()} == {
        "superseded attempts, at most (engine_died 2)": (2, 5 * 2, None),
        "waits before new tries": (2, 1 * 2, None),
        "replayed train steps": (3, 4 * 2, None),
        "starts of further drivers": (1, 5 * 4, None),
        "lost groups of interrupted shards, generated again, at most": (2, None, None),
        "dropped groups: zero_std_1": (1, pytest.approx(9 / 5), 4),
    }
    assert {cause for cause, waste in found.items() if not waste.after_fault} == {"dropped groups: zero_std_1"}


def test_an_undisturbed_run_wastes_only_what_its_filter_drops(commits: list[Commit], config: RunConfig) -> None:
    found = with_prices(
        wasted([commits], [lease(1, 0, 22, Outcome.COMPLETED)], lambda commit: config, lambda epoch: config), 3600
    )
    assert [(waste.cause, waste.count, waste.device_seconds, waste.tokens, waste.price) for waste in found] == [
        ("dropped groups: zero_std_1", 1, 9 / 3, 18 / 3, 9 / 3)
    ]
    assert all(isinstance(waste, Waste) for waste in found)


def test_the_parts_of_a_run_add_up_to_what_it_reserved(ledger: Ledger) -> None:
    write_run(ledger, 3)
    assert ledger.lease is not None
    ledger.lease.release(Outcome.COMPLETED)
    found = run_costs(ledger, price_per_device_hour=3600)
    work = sum(cost.device_seconds for cost in found.steps)
    parts = found.starting_device_seconds + found.idle_device_seconds + found.uncommitted_device_seconds
    assert found.reserved_device_seconds == pytest.approx(work + parts, rel=1e-6)
    assert found.price == pytest.approx(found.reserved_device_seconds)
    assert 0 < work < found.reserved_device_seconds
    assert (found.generated_samples, found.accepted_samples) == (18, 12)
    assert found.tokens_per_accepted_sample == 3 * 18 / 12
    assert found.device_seconds_per_accepted_sample == pytest.approx(found.reserved_device_seconds / 12)
    assert [(one.benchmark, one.trained) for one in found.evaluations] == [("heldout", n) for n in (0, 2, 3)]


def test_the_command_prints_sums_for_people_and_all_for_machines(ledger: Ledger, tmp_path: Path) -> None:
    write_iteration(ledger, 0)
    assert ledger.lease is not None
    ledger.lease.release(Outcome.STOPPED)
    shown = CliRunner().invoke(app, ["costs", "toy", "--price", "2.5", "--store", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "4 samples accepted of 6 generated" in shown.stdout
    assert "dropped groups: zero_std_1" in shown.stdout
    printed = CliRunner().invoke(app, ["costs", "toy", "--json", "--store", str(tmp_path)])
    figures = json.loads(printed.stdout)
    assert figures["steps"][0]["step"] == "rollout"
    assert figures["price"] is None
    missing = CliRunner().invoke(app, ["costs", "nobody", "--store", str(tmp_path)])
    assert missing.exit_code == 2


def test_a_run_without_commits_has_cost_its_start(ledger: Ledger) -> None:
    found = run_costs(ledger)
    assert (found.iterations, found.steps, found.wasted, found.accepted_samples) == (0, (), (), 0)
    assert found.idle_device_seconds == 0
