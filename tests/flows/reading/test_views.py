"""What the views of a run say follows from its commits and its lease."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cairn.flows.reading.samples import iteration_samples
from cairn.flows.reading.views import RunState, RunStatus, all_runs, run_status
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import Outcome
from cairn.storage.opening import open_store
from cairn.storage.store.store import Store
from tests.flows.written_runs import new_run, recorded_reads, write_iteration, write_run


def spelled(status: RunStatus) -> tuple[float | None, float | None]:
    """The first and the last score of the benchmark."""
    return status.eval["heldout"].first, status.eval["heldout"].last


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def test_a_finished_run_is_completed_with_its_last_weights_and_scores(store: Store) -> None:
    ledger = new_run(store)
    write_run(ledger, 3)
    ledger.lease.release(Outcome.COMPLETED)
    status = run_status(store, "toy")
    assert status.state is RunState.COMPLETED
    assert (status.iterations, status.num_rollout, status.iteration, status.step) == (3, 3, None, None)
    assert (status.weight_version, status.state_digest) == (3, f"{3:064x}")
    assert (status.reward, status.trained_reward) == (2 / 3, 0.5)
    assert spelled(status) == (0.25, 1.0)
    assert status.last_commit == "000002/eval.heldout-v000003"
    assert status.driver.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("until", "next_step"),
    [
        (Step.ROLLOUT, Step.ROLLOUT),
        (Step.REWARD, Step.ROLLOUT),
        (Step.FILTER, Step.ROLLOUT),
        (Step.ADVANTAGE, Step.ADVANTAGE),
        (Step.TRAIN, Step.TRAIN),
        (Step.CHECKPOINT, Step.CHECKPOINT),
        (Step.SYNC, Step.SYNC),
        (Step.EVAL, Step.EVAL),
    ],
)
def test_the_next_step_is_the_first_that_is_not_committed(store: Store, until: Step, next_step: Step) -> None:
    ledger = new_run(store)
    write_iteration(ledger, 0)
    write_iteration(ledger, 1, until)
    status = run_status(store, "toy")
    assert (status.iterations, status.iteration, status.step) == (1, 1, next_step)


def test_between_two_iterations_the_next_rollout_is_next(store: Store) -> None:
    ledger = new_run(store)
    write_iteration(ledger, 0)
    status = run_status(store, "toy")
    assert (status.iterations, status.iteration, status.step) == (1, 1, Step.ROLLOUT)


def test_a_run_without_commits_waits_for_the_evaluation_of_its_initial_weights(store: Store) -> None:
    new_run(store)
    status = run_status(store, "toy")
    assert (status.iterations, status.iteration, status.step) == (0, 0, Step.EVAL)
    assert (status.weight_version, status.state_digest, status.reward, status.last_commit) == (0, None, None, None)
    assert spelled(status) == (None, None)


def test_weights_and_reward_are_the_newest_committed_ones(store: Store) -> None:
    ledger = new_run(store)
    write_iteration(ledger, 0)
    write_iteration(ledger, 1, Step.FILTER)
    status = run_status(store, "toy")
    assert (status.weight_version, status.reward, status.trained_reward) == (1, 2 / 3, 0.5)
    assert status.last_commit.startswith("000001/reward")


def test_a_run_whose_driver_lives_is_running(store: Store) -> None:
    write_run(new_run(store), 3)
    assert run_status(store, "toy").state is RunState.RUNNING


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome.FAILED, RunState.FAILED),
        (Outcome.STOPPED, RunState.INTERRUPTED),
        (Outcome.PREEMPTED, RunState.PREEMPTED),
    ],
)
def test_an_unfinished_run_says_how_its_driver_ended(store: Store, outcome: Outcome, state: RunState) -> None:
    ledger = new_run(store)
    write_iteration(ledger, 0)
    ledger.lease.release(outcome)
    assert run_status(store, "toy").state is state


@pytest.mark.proof
def test_a_run_whose_driver_was_killed_is_interrupted(store: Store, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from tests.flows.written_runs import *; "
        "write_iteration(new_run(sys.argv[1]), 0); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[3], timeout=240)
    assert killed.returncode == -9
    status = run_status(store, "toy")
    assert (status.state, status.iterations) == (RunState.INTERRUPTED, 1)


def test_an_unfinished_run_shows_its_newest_evaluation(store: Store) -> None:
    ledger = new_run(store, rollout={"num_rollout": 9})
    write_run(ledger, 3)
    assert spelled(run_status(store, "toy")) == (0.25, 0.75)


def test_a_status_costs_the_same_after_many_iterations(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = new_run(store, rollout={"num_rollout": 30})
    reads = recorded_reads(monkeypatch)

    def cost() -> int:
        reads.clear()
        run_status(store, "toy")
        return len(reads)

    costs: dict[int, int] = {}
    for iteration in range(12):
        write_iteration(ledger, iteration)
        costs[iteration + 1] = cost()
    assert costs[12] == costs[4]


def test_runs_are_listed_by_name_and_a_damaged_one_does_not_hide_the_others(store: Store, tmp_path: Path) -> None:
    write_iteration(new_run(store, "b"), 0)
    write_iteration(new_run(store, "a"), 0)
    commit = tmp_path / "runs/a/iterations/000000/train.json"
    commit.write_text(commit.read_text().replace('"epoch": 1', '"epoch": 2'))
    assert [(status.run, status.state) for status in all_runs(store)] == [
        ("a", RunState.DAMAGED),
        ("b", RunState.RUNNING),
    ]


def test_samples_carry_what_every_step_made_of_them(store: Store) -> None:
    ledger = new_run(store)
    write_run(ledger, 2)
    views = iteration_samples(ledger, 1)
    assert [view.number for view in views] == list(range(6))
    second = views[1].model_dump()
    expected: dict[str, Any] = {
        "number": 1, "group_id": 3, "sample_index": 1, "iteration": 1, "shard": "00-000",
        "episode": None, "prompt": "[3] 2 + 2 =",
        "response": "5 \x1b[31m[bold]\x7f\x9b31m", "label": "4", "reward": 0.0, "advantage": -1.0,
        "finish_reason": "stop", "status": "completed", "disposition": "train", "reason": None, "error": None,
        "prompt_tokens": 3, "response_tokens": 2, "images": (),
    }  # fmt: skip
    assert second == expected
    dropped = views[5]
    assert (dropped.disposition, dropped.reason, dropped.advantage, dropped.reward) == ("drop", "zero_std_1", None, 1.0)


def test_samples_taken_from_the_buffer_are_shown_with_the_iteration_that_generated_them(store: Store) -> None:
    ledger = new_run(store)
    write_iteration(ledger, 0)
    write_iteration(ledger, 1, buffered=(1,))
    views = iteration_samples(ledger, 1)
    assert [(view.iteration, view.group_id) for view in views] == [(0, 1)] * 2 + [(1, g) for g in (3, 3, 4, 4, 5, 5)]
    assert views[0].disposition == "train"


def test_samples_of_an_unfinished_iteration_show_what_is_there(store: Store) -> None:
    ledger = new_run(store)
    write_iteration(ledger, 0, Step.REWARD)
    view = iteration_samples(ledger, 0)[0]
    assert (view.reward, view.advantage, view.disposition) == (None, None, None)


def test_an_iteration_without_samples_is_an_error_that_names_the_last(store: Store) -> None:
    ledger = new_run(store)
    write_iteration(ledger, 0)
    with pytest.raises(LookupError, match="has no samples of iteration 7; its last iteration is 0"):
        iteration_samples(ledger, 7)
