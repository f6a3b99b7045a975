"""New tries are counted by class of error, granted by policy, and told."""

import errno
from pathlib import Path

import pytest

from cairn.configs.schema.operations import GraderRetries, RetryConfig, RetryRule
from cairn.configs.schema.run import RunConfig
from cairn.engines.types.errors import (
    ClusterLost,
    EngineDied,
    EngineError,
    EngineTimeout,
    GenerationFailed,
    GraderFailed,
    GraderUnavailable,
)
from cairn.flows.cli.printing import print_parts
from cairn.flows.cli.tables import status_lines
from cairn.flows.iteration import iteration
from cairn.flows.reading.metrics import find_metric, iteration_metrics
from cairn.flows.reading.views import run_status
from cairn.storage.ledger.commits import Step
from cairn.storage.opening import open_store
from cairn.storage.store.errors import NoSpace, StoreError, StoreRefused
from cairn.tasks.durable.retries import RetryTally, error_class
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

PLACE = (3, Step.ROLLOUT, "00-000")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineDied(), "engine_died"),
        (EngineTimeout(), "engine_timeout"),
        (GenerationFailed(), "engine"),
        (EngineError(), "engine"),
        (ClusterLost(), None),
        (StoreError(), "store"),
        (NoSpace(), "disk"),
        (StoreRefused(), None),
        (OSError(errno.ENOSPC, "full"), "disk"),
        (OSError(errno.EACCES, "denied"), None),
        (GraderUnavailable(), "grader"),
        (GraderFailed(), None),
        (ValueError(), None),
    ],
)
def test_errors_are_told_apart_by_what_helps(error: Exception, kind: str | None) -> None:
    assert error_class(error) == kind


def test_waits_double_up_to_the_longest() -> None:
    assert RetryConfig(retries=4, retry_delay_seconds=1.0).delays() == [1, 2, 4, 8]
    assert RetryConfig(retries=4, retry_delay_seconds=20.0).delays() == [20, 40, 60, 60]
    assert RetryConfig(retries=50).delays()[-1] == 60
    assert GraderRetries(retries=2, retry_delay_seconds=90).delays() == [90, 90]


def test_the_first_rule_that_fits_a_step_and_an_error_counts() -> None:
    died = RetryRule(steps=("rollout", "eval"), errors=("engine_died",), retries=9)
    rollout = RetryRule(steps=("rollout",), retries=7)
    policy = RetryConfig(retries=2, rules=(died, rollout))
    tries = {
        (step, e): policy.policy(step, e).retries for step in ("rollout", "train") for e in ("engine_died", "disk")
    }  # type: ignore[arg-type]
    assert tries == {
        ("rollout", "engine_died"): 9,
        ("rollout", "disk"): 7,
        ("train", "engine_died"): 2,
        ("train", "disk"): 2,
    }
    assert RetryConfig().policy("train", "disk").retries > RetryConfig().retries, "somebody has to free some space"


def test_each_class_of_errors_has_tries_of_its_own() -> None:
    tally = RetryTally(RetryConfig(retries=1, retry_delay_seconds=0.5, rules=()))
    died, silent = EngineDied(), StoreError()
    assert tally.ask(PLACE, died)
    assert tally.was_granted(died)
    assert tally.next_wait(PLACE) == 0.5
    assert tally.next_wait(PLACE) == 0.0
    assert tally.ask(PLACE, silent)
    assert tally.next_wait(PLACE) == 0.5
    assert not tally.ask(PLACE, EngineDied())
    assert tally.ask(PLACE, EngineDied()), "a step that failed for good begins anew when it is called again"
    assert not tally.ask(PLACE, ValueError())


def test_new_tries_and_waits_stand_in_the_commit_the_metrics_and_the_status(
    tiny_assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config: RunConfig = tiny_config(tiny_assets, rollout={"num_rollout": 1, "rollout_max_response_len": 4})
    with tiny_context(str(tmp_path), config) as (run, _):
        place = (0, Step.ROLLOUT, "00-000")
        for error in (EngineDied(), EngineDied(), StoreError()):
            run.retries.failed(place, 0.5)
            assert run.retries.ask(place, error)
            run.retries.next_wait(place)
        run.replays.add(0.25)
        run.replays.add(0.5)
        commits = iteration(run, DirectSteps(run), 0)
        metrics = iteration_metrics(commits, config)
        assert (metrics["retries/engine_died"], metrics["retries/store"]) == (2, 1)
        assert metrics["perf/retry_wait_time"] == 1 + 2 + 1
        assert metrics["recovery/replayed_steps"] == 2
        assert [commit.timings["failed_tries"] for commit in commits if "failed_tries" in commit.timings] == [1.5]
        assert [commit.timings["replay"] for commit in commits if "replay" in commit.timings] == [0.75]
        assert all(find_metric(name) is not None for name in metrics if name.startswith(("retries/", "perf/retry")))
    status = run_status(open_store(str(tmp_path)), "tiny")
    assert (status.retries.by_error, status.retries.waited) == ({"engine_died": 2, "store": 1}, 4.0)
    print_parts(status_lines(status))
    assert "tried again" in (output := capsys.readouterr().out)
    assert "steps 3 times (engine_died 2, store 1); 4.0 s waited" in output
