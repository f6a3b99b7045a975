"""Approval gates: where a run waits for a person, and what each verdict does."""

import json
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cairn.configs.errors import ConfigError
from cairn.configs.loader import parse
from cairn.flows.driver import approval
from cairn.flows.driver.approval import AwaitingApproval, Rejected, wait_for_approval
from cairn.flows.events import Stopping
from cairn.flows.history.fork import fork
from cairn.flows.iteration import iteration
from cairn.flows.orchestration.flow_runs import run_tags
from cairn.flows.pipeline import Pipeline
from cairn.flows.reading.gates import ask, blocking_gate, decide, due
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.decisions import Gate, GateState
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from tests.background import in_background
from tests.commands import cairn
from tests.flows.written_runs import RECIPE, config_of, new_run, write_iteration, write_run
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests
from tests.waiting import wait_for

CAIRN = Path(sys.executable).with_name("cairn")


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approval, "POLL_INTERVAL", 0.02)


def test_gates_are_due_before_the_iterations_that_the_recipe_names(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path), rollout={"num_rollout": 7}, approval={"before": [1], "every": 3})
    config = config_of(ledger)
    assert {i: found[0] for i in range(7) if (found := due(ledger, config, i))} == {
        1: "before",
        3: "every",
        6: "every",
    }


def evaluated(ledger: Ledger, scores: list[float]) -> list[int]:
    """Iterations that an evaluation's fall holds, if a person approves each as it comes."""
    blocking, config = [], config_of(ledger)
    for index, score in enumerate(scores):
        if due(ledger, config, index):
            blocking.append(index)
            ledger.decisions.record(lambda so_far, index=index: Gate(iteration=index, cause="eval_drop"))
            decide(ledger, config, index, approved=True, why=None, by=None)
        for commit in write_iteration(ledger, index, Step.EVAL):
            assert commit.step is not Step.EVAL or commit.weight_version_out == 0
        attempt = ledger.attempt(index, Step.EVAL, f"heldout-v{index + 1:06d}")
        trained = ledger.find(index, Step.TRAIN)
        assert trained is not None
        ledger.commit(
            iteration=index, step=Step.EVAL, shard=f"heldout-v{index + 1:06d}", attempt=attempt,
            inputs={trained.name: trained.digest}, config_digest="0" * 64, environment=trained.environment,
            started_at=0.0, values={"benchmark": "heldout"}, metrics={"heldout": score},
        )  # fmt: skip
    return blocking


def test_a_fall_below_the_best_score_since_the_last_approval_holds_the_next_iteration(tmp_path: Path) -> None:
    ledger = new_run(
        str(tmp_path),
        rollout={"num_rollout": 8},
        eval={"eval_interval": 1, "skip_eval_before_train": True},
        approval={"eval_drop": {"benchmark": "heldout", "drop": 0.1}},
    )
    # Falls slowly to 0.15 below 0.6, and is approved at 0.45; from there 0.34 is a fall again, 0.36 was none.
    assert evaluated(ledger, [0.5, 0.6, 0.55, 0.45, 0.46, 0.4, 0.34, 0.34]) == [4, 7]


@pytest.mark.parametrize(
    ("approval_section", "sentence"),
    [
        ({"before": [3]}, "approval.before names iteration 3, but rollout.num_rollout is 3"),
        ({"eval_drop": {"benchmark": "none", "drop": 0.1}}, "which is not one of eval.benchmarks"),
        ({"eval_drop": {"benchmark": "heldout", "drop": 0}}, "approval.eval_drop.drop is 0"),
    ],
)
def test_a_gate_that_would_never_be_asked_for_is_refused(approval_section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse({**RECIPE, "approval": approval_section})


def test_status_and_runs_say_that_a_run_waits_and_verdicts_are_given_by_command(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path), approval={"before": [1]})
    write_run(ledger, 1)
    store = ("--store", str(tmp_path))
    assert "is not waiting" in cairn("approve", "toy", *store).stderr
    ask(ledger, "an evaluation elsewhere fell", "watcher")
    status = json.loads(cairn("status", "toy", "--json", *store).stdout)
    assert (status["state"], status["gate"]["state"], status["gate"]["iteration"]) == ("waiting", "open", 1)
    assert "waiting" in cairn("runs", *store).stdout
    assert "cairn approve toy@1" in cairn("status", "toy", *store).stdout

    result = cairn("reject", "toy", "--why", "too short", "--as", "ada", "--json", *store)
    assert json.loads(result.stdout)["what"] == {"kind": "verdict", "iteration": 1, "approved": False}
    assert json.loads(cairn("status", "toy", "--json", *store).stdout)["state"] == "rejected"
    assert "rejected before iteration 1 by ada" in cairn("status", "toy", *store).stdout

    assert cairn("approve", "toy@1", *store).exit_code == 0
    assert json.loads(cairn("status", "toy", "--json", *store).stdout)["state"] == "running"
    for arguments, sentence in (
        (("reject", "toy@0"), "does not wait before iteration 0"),
        (("reject", "toy@3"), "has iterations 0 to 2, not 3"),
        (("approve", "toy@2"), "does not wait before iteration 2"),
    ):
        refused = cairn(*arguments, *store)
        assert (refused.exit_code, sentence in refused.stderr) == (2, True), refused.stderr
    write_iteration(ledger, 1)
    assert "iteration 1 of run 'toy' has begun" in cairn("reject", "toy@1", *store).stderr
    checked = json.loads(cairn("verify", "toy", "--json", *store).stdout)
    assert (checked["decisions"], checked["findings"]) == (3, [])


def test_a_reason_opens_one_gate_and_the_run_can_go_on_even_if_its_iteration_began_meanwhile(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path))
    write_run(ledger, 1)
    requested = ask(ledger, "it fell")
    assert requested is not None
    assert requested.what == Gate(iteration=1, cause="asked")
    assert ask(ledger, "it fell") is None
    both = ask(ledger, "it grew slow")
    assert both is not None
    assert (both.what, both.why) == (requested.what, "it fell; it grew slow")
    write_iteration(ledger, 1)  # its driver had looked just before
    assert blocking_gate(ledger, 2) is not None
    decide(ledger, config_of(ledger), None, approved=False, why=None, by=None)
    assert ask(ledger, "another") is None, "a rejected run stays rejected"
    decide(ledger, config_of(ledger), None, approved=True, why=None, by=None)
    assert blocking_gate(ledger, 2) is None
    assert ask(ledger, "it grew slow") is None, "what was approved is not asked again"
    write_iteration(ledger, 2)
    with pytest.raises(ValueError, match="has begun all its 3 iterations"):
        ask(ledger, "too late")


def test_a_fork_does_not_ask_again_about_what_it_shares_but_about_its_own_iterations(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_assets, approval={"before": [1, 2], "wait": False}, checkpoint={"save_interval": 1})
    with tiny_context(str(tmp_path), config) as (run, _):
        decide(run.ledger, config, 1, approved=True, why=None, by=None)
        for index in range(2):
            wait_for_approval(run, index)
            iteration(run, DirectSteps(run), index)
        with pytest.raises(AwaitingApproval, match="cairn approve tiny@2"):
            wait_for_approval(run, 2)
        child = fork(run.ledger, 1, "child", ["training.lr=0.002"])
    assert blocking_gate(child, 1) is None
    assert due(child, config, 2) == ("before", "approval.before names iteration 2")


@pytest.fixture
def waiting(tiny_assets: Path, tmp_path: Path) -> Iterator[tuple[RunContext, list[str]]]:
    config = tiny_config(tiny_assets, approval={"before": [0]})
    with tiny_context(str(tmp_path), config) as (run, events):
        yield run, events  # type: ignore[misc]


def at_gate(run: RunContext) -> tuple[threading.Thread, list[Exception]]:
    """A driver in a thread of its own that waits."""
    raised: list[Exception] = []

    def drive() -> None:
        try:
            wait_for_approval(run, 0)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=drive)
    thread.start()
    wait_for(lambda: blocking_gate(run.ledger, 0) is not None)
    return thread, raised


@pytest.mark.parametrize("verdict", ["approve", "reject", "stop", "takeover"])
def test_a_driver_waits_at_its_gate_until_somebody_decides_or_it_is_to_end(
    waiting: tuple[RunContext, Any], verdict: str
) -> None:
    run, events = waiting
    thread, raised = at_gate(run)
    if verdict == "stop":
        run.stopping.set()
    elif verdict == "takeover":
        Ledger.open(run.ledger.store, "tiny").acquire(takeover=True)
    else:
        decide(run.ledger, run.config, None, approved=verdict == "approve", why="seen", by="ada")
    thread.join(30)
    assert not thread.is_alive()
    expected = {"approve": [], "reject": [Rejected], "stop": [Stopping], "takeover": ["LeaseLost"]}[verdict]
    assert [type(error) if isinstance(expected[0], type) else type(error).__name__ for error in raised] == expected
    messages = [event.text for event in events if isinstance(event, Message)]
    assert messages[0].startswith(
        "Run tiny waits before iteration 0 (approval.before names iteration 0): cairn approve"
    )
    if verdict == "approve":
        assert messages[-1] == "Iteration 0 may begin, approved by ada (seen)"
        wait_for_approval(run, 0)  # not asked again


def test_with_a_lag_the_iterations_before_a_gate_are_finished_while_it_is_shut(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = tiny_config(
        tiny_assets,
        rollout={"num_rollout": 4, "pipeline": "lagged", "lag": 1, "rollout_batch_size": 2},
        approval={"before": [2], "wait": False},
    )
    with tiny_context(str(tmp_path), config) as (run, _):
        pipeline = Pipeline(
            run,
            DirectSteps(run),
            0,
            learned=lambda index: None,
            stop=lambda: None,
            approved=lambda i: wait_for_approval(run, i),
        )
        with pytest.raises(AwaitingApproval):
            list(pipeline.run(pipeline.iterate, 4))
        assert run.find(1, Step.SYNC) is not None, "learned to its end, although collecting 2 was withheld"
        assert run.ledger.last_iteration() == 1
        gate = run.ledger.decisions.gates()[2]
        assert gate.state is GateState.OPEN


@pytest.mark.slow
def test_a_driver_that_is_killed_at_a_gate_comes_back_to_it_and_ends_in_the_same_bits(
    tiny_assets: Path, tmp_path: Path, api_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_API_URL", api_url)
    config = tiny_config(tiny_assets, rollout={"num_rollout": 2}, approval={"before": [1]})
    recipe = tmp_path / "gated.yaml"
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))

    def state() -> dict[str, Any]:
        result = cairn("status", "gated", "--json")
        return json.loads(result.stdout) if result.exit_code == 0 else {"state": None}

    for command in (("train", "gated.yaml"), ("resume", "gated")):
        with in_background(CAIRN, *command) as process:  # on a terminal's stdout it says what it waits for
            assert any("waits before iteration 1" in line for line in process.stdout)
            if command[0] == "train":
                assert wait_for(lambda: state()["state"] == "waiting"), "what iteration 0 stores beside it is committed"
                process.send_signal(signal.SIGKILL)
                process.communicate(timeout=60)
                assert (state()["state"], state()["gate"]["gate"]["number"]) == ("waiting", 1)
                continue
            # the iteration and the train flow over it, and not what the killed driver left
            assert wait_for(lambda: shown_in_prefect(api_url, tmp_path) == ["AwaitingApproval"] * 2)
            assert cairn("approve", "gated", "--why", "sound").exit_code == 0
            process.communicate(timeout=300)
            assert process.returncode == 0
    assert state()["state"] == "completed"
    ledger = Ledger.open(open_store(str(tmp_path)), "gated")
    assert [one.what.kind for one in ledger.decisions.all()] == ["gate", "verdict"], "asked once"
    ungated = tiny_config(tiny_assets, rollout={"num_rollout": 2})
    with tiny_context(str(tmp_path / "ungated"), ungated) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
        digests = train_digests(run, range(2))
    assert [commit.state_digest for i in range(2) if (commit := ledger.find(i, Step.TRAIN))] == digests


def shown_in_prefect(api_url: str, store: Path) -> list[str | None]:
    """Names of the states of the run's flow runs that are alive. The server has other tests' flow runs too."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.settings import PREFECT_API_URL, temporary_settings

    tags = sorted(run_tags("gated", open_store(str(store)).url))
    alive = FlowRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING"]}}, "tags": {"all_": tags}})
    with temporary_settings({PREFECT_API_URL: api_url}), get_client(sync_client=True) as client:
        return [run.state.name for run in client.read_flow_runs(flow_run_filter=alive) if run.state]
