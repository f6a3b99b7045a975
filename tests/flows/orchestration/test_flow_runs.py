"""Flow runs of a driver and of its iterations, on a real embedded server."""

import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import httpx
import prefect
import prefect.runtime.flow_run
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, LogFilter
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import LogSort
from prefect.futures import PrefectFuture
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Failed, State

from cairn.configs.schema.operations import RetryConfig
from cairn.engines.types.errors import EngineDied, GraderUnavailable
from cairn.flows.driver.preemption import Preempted
from cairn.flows.orchestration.flow_runs import (
    PrefectSteps,
    confirm_cancel,
    current_flow_run,
    driving,
    run_tags,
    subflow,
    wait_for_cancel,
)
from cairn.storage.ledger.commits import Step
from cairn.storage.store.errors import LeaseLost, NoSpace, StoreError, StoreRefused
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.retries import RetryTally
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(900)

DYING_TRAIN = '''
import os, signal, sys, time
from pathlib import Path
from prefect import flow, get_client, task
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run, task_run
from cairn.flows.orchestration.flow_runs import driving, subflow

@task
def step(first: bool):
    if first:
        for _ in range(1000):  # Prefect sends what happened so far in the background
            if is_known_to_run():
                break
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

def is_known_to_run():
    with get_client(sync_client=True) as client:
        try:
            return client.read_task_run(task_run.id).state_name == "Running"
        except ObjectNotFound:
            return False

@flow(name="dying", persist_result=False)
def train(store: str, options: dict[str, list[int]]):
    """Dies within its iteration, the first time."""
    attempts = Path(store, "attempts")
    first = not attempts.exists()
    with attempts.open("a") as lines:
        lines.write(f"{flow_run.id} {options}\\n")
    with driving("dying", store) as tags:
        subflow(lambda index: step(first), name="iteration", run_name="dying {index}", tags=tags)(7)

if __name__ == "__main__":
    if sys.argv[1] == "serve":
        train.serve(name="test", pause_on_shutdown=False, print_starting_message=False)
    else:
        train(sys.argv[1], {})
'''


@dataclass(frozen=True)
class NamedStep:
    """Stands where a durable step would."""

    name: Step
    body: Callable[..., Any]

    def __call__(self, run: object, index: int, shard: str | None, *inputs: Any) -> Any:
        return self.body(*inputs)


@dataclass(frozen=True)
class Made:
    """What a step returns. No step could be given it if Prefect walked through it."""

    inside: list[State[None]] = field(default_factory=lambda: [Failed()])


def make(*inputs: Any) -> Made:
    return Made()


def prefect_steps(emit: Callable[[Message], None] = lambda message: None, **policy: Any) -> Any:
    """Steps as Prefect tasks, outside of a run."""
    run = SimpleNamespace(retries=RetryTally(RetryConfig(**policy)), stopping=threading.Event(), emit=emit)
    return PrefectSteps(cast(Any, run))


def flow_runs(client: SyncPrefectClient, tags: frozenset[str]) -> list[FlowRun]:
    """All flow runs with these tags, oldest first."""
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate({"tags": {"all_": sorted(tags)}}))
    return sorted(found, key=lambda flow_run: cast(Any, flow_run.created))


def states(client: SyncPrefectClient, tags: frozenset[str]) -> list[tuple[str, str | None]]:
    return [(flow_run.name.split()[0], flow_run.state_name) for flow_run in flow_runs(client, tags)]


def task_runs(client: SyncPrefectClient, flow_run: UUID) -> list[Any]:
    return client.read_task_runs(flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [flow_run]}}))


@pytest.fixture(scope="module")
def url(api_url: str) -> Iterator[str]:
    with temporary_settings({PREFECT_API_URL: api_url}):
        yield api_url


@pytest.fixture
def client(url: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def script(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(DYING_TRAIN)
    return script


def test_the_graph_of_an_iteration_shows_which_step_read_what(url: str, client: SyncPrefectClient) -> None:
    steps = prefect_steps()

    def one_iteration(index: int) -> list[Any]:
        shards = [steps.submit(NamedStep(Step.ROLLOUT, make), index, shard) for shard in ("00-000", "00-001")]
        selection = steps.call(NamedStep(Step.FILTER, make), index, None, [shard.result() for shard in shards])
        steps.call(NamedStep(Step.TRAIN, make), index, None, selection)
        return shards

    @prefect.flow(persist_result=False)
    def train() -> UUID:
        with driving("graph", ".") as tags:
            returned = subflow(one_iteration, name="iteration", run_name="graph {index:06d}", tags=tags)(41)
        assert all(isinstance(shard, PrefectFuture) for shard in returned), "Prefect walked through it, to their states"
        return UUID(prefect.runtime.flow_run.id)

    def nodes(flow_run: UUID) -> list[Any]:
        graph = httpx.get(f"{url}/flow_runs/{flow_run}/graph-v2", timeout=60).raise_for_status().json()
        return [node for _, node in graph["nodes"] if node["state_type"] == "COMPLETED"]

    driver = train()
    tags = run_tags("graph", ".")
    assert {"cairn", "run:graph"} < tags
    iteration = next(flow_run for flow_run in flow_runs(client, tags) if flow_run.name == "graph 000041")
    (below,) = wait_for(lambda: nodes(driver))
    assert (below["kind"], below["id"]) == ("flow-run", str(iteration.id))

    found = wait_for(lambda: (done := nodes(iteration.id)) and len(done) == 4 and done)
    names = {node["id"]: node["label"] for node in found}
    edges = {(parent["id"], node["id"]) for node in found for parent in node["parents"]}
    assert sorted((names[parent], names[child]) for parent, child in edges) == [
        ("filter", "train"),
        ("rollout 00-000", "filter"),
        ("rollout 00-001", "filter"),
    ]
    found = LogFilter.model_validate({"flow_run_id": {"any_": [iteration.id]}})
    logs = wait_for(lambda: (sent := client.read_logs(found)) and sent[-1].message.startswith("Finished") and sent)
    assert all(log.task_run_id is None for log in logs)
    # A tagged task asks the API for a concurrency slot.
    assert [task_run.tags for task_run in task_runs(client, iteration.id)] == [[], [], [], []]


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (EngineDied("its process is gone"), 3),
        pytest.param(StoreError("no answer"), 3, marks=pytest.mark.slow),
        pytest.param(GraderUnavailable("it was killed"), 3, marks=pytest.mark.slow),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        pytest.param(NoSpace("no space is left"), 2, marks=pytest.mark.slow),
        pytest.param(StoreRefused("no such bucket"), 1, marks=pytest.mark.slow),
        (ValueError("a bug"), 1),
    ],
)
def test_a_step_is_tried_again_only_after_errors_that_a_new_try_can_mend(
    url: str, error: Exception, calls: int
) -> None:
    times: list[float] = []
    messages: list[Message] = []

    def fail(*inputs: Any) -> None:
        times.append(time.monotonic())
        raise error

    @prefect.flow
    def train() -> None:
        rules = [{"errors": ["disk"], "retries": 1, "retry_delay_seconds": 0.2}]
        steps = prefect_steps(messages.append, retries=2, retry_delay_seconds=0.2, rules=rules)
        steps.call(NamedStep(Step.TRAIN, fail), 7, None)

    with pytest.raises(type(error), match=re.escape(str(error))):
        train()
    assert len(times) == calls
    assert messages == [Message(f"Iteration 7: train is tried again: {error}", "warning")] * (calls - 1)
    waited = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(waited[attempt] >= 0.2 * 2**attempt for attempt in range(calls - 1))


def test_an_iteration_is_made_in_two_requests(
    url: str, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []
    send = httpx.Client.send

    def noted(client: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        if request.method == "POST" and not request.url.path.endswith("/logs/"):
            requests.append(request.url.path.removeprefix("/api"))
        return send(client, request, **options)

    @prefect.flow(persist_result=False)
    def train() -> None:
        with driving("two", ".") as tags:
            flow = subflow(lambda index: requests.append("body"), name="iteration", run_name="two {index}", tags=tags)
            flow(0)
            requests.clear()
            monkeypatch.setattr(httpx.Client, "send", noted)
            flow(1)
            monkeypatch.undo()

    train()
    assert requests[:3] == ["/task_runs/", "/flow_runs/", "body"]
    second = next(flow_run for flow_run in flow_runs(client, run_tags("two", ".")) if flow_run.name == "two 1")
    assert (second.state_name, second.run_count, second.parameters) == ("Completed", 1, {"index": 1})
    assert second.start_time is not None
    assert second.parent_task_run_id is not None


def test_a_flow_that_tries_again_in_its_process_gets_fresh_iterations(url: str, client: SyncPrefectClient) -> None:
    @prefect.flow(flow_run_name="again", retries=1, persist_result=False)
    def train() -> None:
        with driving("again", ".") as tags:
            subflow(lambda index: None, name="iteration", run_name="iteration {index}", tags=tags)(0)
            if prefect.runtime.flow_run.run_count == 1:
                raise RuntimeError("once")

    train()
    expected = [("again", "Completed"), ("iteration", "Completed"), ("iteration", "Completed")]
    assert states(client, run_tags("again", ".")) == expected


@pytest.mark.proof
def test_the_next_driver_of_a_run_marks_what_a_killed_one_left_as_crashed(
    url: str, client: SyncPrefectClient, script: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "PREFECT_API_URL": url}
    killed = subprocess.run([sys.executable, script, tmp_path], env=environment, capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL

    @prefect.flow(flow_run_name="successor", persist_result=False)
    def succeed(store: str) -> None:
        with driving("dying", store):
            pass

    tags = run_tags("dying", str(tmp_path))
    driver, iteration = flow_runs(client, tags)
    (step,) = wait_for(lambda: [run for run in task_runs(client, iteration.id) if run.state_name == "Running"])
    succeed(f"{tmp_path}/another-store")
    assert [flow_run.state_name for flow_run in flow_runs(client, tags)] == ["Running", "Running"]

    def lost() -> None:
        raise LeaseLost("another driver has the run")

    @prefect.flow(flow_run_name="superseded", persist_result=False)
    def come_late(store: str) -> None:
        with driving("dying", store, lost):
            pass

    with pytest.raises(LeaseLost):
        come_late(str(tmp_path))
    assert [flow_run.state_name for flow_run in flow_runs(client, tags)] == ["Running", "Running", "Failed"]
    succeed(str(tmp_path))
    expected = ["Crashed", "Crashed", "Failed", "Completed"]
    assert [flow_run.state_name for flow_run in flow_runs(client, tags)] == expected
    (stands_for_iteration,) = task_runs(client, driver.id)
    assert (client.read_task_run(step.id).state_name, stands_for_iteration.state_name) == ("Crashed", "Crashed")


def test_cancel_of_a_flow_run_that_no_runner_started_is_heard_by_its_driver_and_confirmed(
    url: str, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.flows.orchestration.flow_runs.CANCEL_INTERVAL", 0.05)
    found: list[UUID] = []
    over = threading.Event()

    @prefect.flow(flow_run_name="unwanted", persist_result=False)
    def train() -> None:
        found.append(own := current_flow_run().id)
        threading.Timer(0.5, over.set).start()
        assert not wait_for_cancel(own, over), "nobody cancels it"
        # What the Cancel button of the interface sends.
        cancelling = {"type": "CANCELLING", "name": "Cancelling", "message": "Cancelled from the UI"}
        httpx.post(f"{url}/flow_runs/{own}/set_state", json={"state": cancelling, "force": True}).raise_for_status()
        assert wait_for_cancel(own, threading.Event())
        raise Preempted

    with pytest.raises(Preempted):
        train()
    (flow_run,) = found
    assert client.read_flow_run(flow_run).state_name == "Crashed", "as Prefect has it"
    confirm_cancel(flow_run)
    assert client.read_flow_run(flow_run).state_name == "Cancelled"


@pytest.mark.slow
def test_retry_runs_a_killed_flow_run_of_a_deployment_again_with_its_parameters(
    url: str, client: SyncPrefectClient, script: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "PREFECT_API_URL": url, "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    server = subprocess.Popen([sys.executable, script, "serve"], env=environment, stderr=subprocess.DEVNULL)
    try:
        found = {"deployments": {"name": {"any_": ["test"]}}}
        (deployment,) = wait_for(lambda: httpx.post(f"{url}/deployments/filter", json=found, timeout=60).json())
        parameters = {"store": str(tmp_path), "options": {"numbers": [1, 2]}}
        run = client.create_flow_run_from_deployment(UUID(deployment["id"]), parameters=parameters)
        wait_for(lambda: client.read_flow_run(run.id).state_name == "Crashed")
        # What the Retry button of the interface sends.
        retry = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
        httpx.post(f"{url}/flow_runs/{run.id}/set_state", json={"state": retry, "force": True}).raise_for_status()
        wait_for(lambda: client.read_flow_run(run.id).state_name == "Completed")
    finally:
        server.terminate()
        server.wait(180)
    assert (tmp_path / "attempts").read_text() == 2 * f"{run.id} {parameters['options']}\n"
    driver, *iterations = flow_runs(client, run_tags("dying", str(tmp_path)))
    assert (driver.id, driver.run_count) == (run.id, 2)
    assert [iteration.state_name for iteration in iterations] == ["Crashed", "Completed"]


def test_a_silenced_console_shows_nothing_and_the_interface_still_has_the_logs(
    url: str, client: SyncPrefectClient
) -> None:
    code = """
from prefect import flow
from prefect.logging import get_run_logger
from cairn.flows.orchestration.flow_runs import silence_console

@flow
def failing():
    get_run_logger().info("a line for the interface")
    raise ValueError("told by the command line")

silence_console()
try:
    failing()
except ValueError:
    pass
"""
    environment = {**os.environ, "PREFECT_API_URL": url}
    finished = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=300)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, b"", b"")
    assert "a line for the interface" in [log.message for log in client.read_logs(sort=LogSort.TIMESTAMP_DESC)]
