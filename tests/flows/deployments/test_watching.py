"""Flow runs whose drivers are gone, on a real server, over real leases of real processes."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prefect
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Crashed, Paused, Pending, Running, State

from cairn.flows.deployments import watching
from cairn.flows.deployments.watching import check_once
from cairn.flows.orchestration.flow_runs import run_tags

DRIVER = """
import sys, time
from cairn.storage.ledger.leases import Lease
from cairn.storage.opening import open_store
Lease.acquire(open_store(sys.argv[1]), sys.argv[2])
print("owned", flush=True)
time.sleep(600)
"""

EXECUTES = """
import os, sys, time, uuid
os.environ["PREFECT_API_URL"] = sys.argv[2]
from cairn.flows.deployments.watching import record_process
record_process(uuid.UUID(sys.argv[1]))
print("said", flush=True)
time.sleep(600)
"""

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]

Begin = Callable[..., FlowRun]


@prefect.flow(name="watched")
def watched(run: str, store: str, restarts: int = 0) -> None: ...


@pytest.fixture(scope="module")
def client(api_url: str) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: api_url}), get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def begin(client: SyncPrefectClient, tmp_path: Path) -> Begin:
    """Makes a flow run of a deployment, as it stands once its driver has the lease."""
    deployment = client.create_deployment(client.create_flow(watched), "cairn", enforce_parameter_schema=False)

    def begin(run: str, restarts: int = 0) -> FlowRun:
        parameters: dict[str, Any] = {"run": run, "store": str(tmp_path), "restarts": restarts}
        made = client.create_flow_run_from_deployment(deployment, parameters=parameters, name=run)
        client.update_flow_run(made.id, tags=run_tags(run, str(tmp_path)))
        put(client, made, Running())
        return made

    return begin


def put(client: SyncPrefectClient, flow_run: FlowRun, state: "State[Any]") -> None:
    client.set_flow_run_state(flow_run.id, state, force=True)


def state(client: SyncPrefectClient, flow_run: FlowRun) -> str | None:
    return client.read_flow_run(flow_run.id).state_name


def driver(store: Path, run: str) -> "subprocess.Popen[str]":
    """A process that owns the run."""
    process = subprocess.Popen([sys.executable, "-c", DRIVER, store, run], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "owned\n"
    return process


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_killed_driver_is_marked_and_started_again_as_often_as_it_may(
    client: SyncPrefectClient, begin: Begin, tmp_path: Path
) -> None:
    flow_run = begin("often", restarts=2)
    for _ in range(2):
        process = driver(tmp_path, "often")
        check_once(client)
        assert state(client, flow_run) == "Running"
        kill(process)
        check_once(client)
        assert state(client, flow_run) == "AwaitingRetry"
        put(client, flow_run, Running())
        check_once(client)
        assert state(client, flow_run) == "Running", "it has yet to take the lease"
    kill(driver(tmp_path, "often"))
    check_once(client)
    assert state(client, flow_run) == "Crashed"
    check_once(client)
    assert state(client, flow_run) == "Crashed"


def test_a_killed_driver_stays_where_nobody_asked_for_restarts(
    client: SyncPrefectClient, begin: Begin, tmp_path: Path
) -> None:
    flow_run = begin("once")
    kill(driver(tmp_path, "once"))
    check_once(client)
    assert state(client, flow_run) == "Crashed"


def test_a_run_that_waits_for_a_person_is_neither_marked_nor_started_again(
    client: SyncPrefectClient, begin: Begin, tmp_path: Path
) -> None:
    flow_run = begin("suspended", restarts=3)
    kill(driver(tmp_path, "suspended"))
    put(client, flow_run, Paused(name="Suspended"))
    check_once(client)
    assert state(client, flow_run) == "Suspended"


def test_a_driver_that_dies_while_it_is_cancelled_is_cancelled_and_not_started_again(
    client: SyncPrefectClient, begin: Begin, tmp_path: Path
) -> None:
    flow_run = begin("unwanted", restarts=3)
    process = driver(tmp_path, "unwanted")
    put(client, flow_run, Cancelling())
    check_once(client)
    assert state(client, flow_run) == "Cancelling"
    kill(process)
    check_once(client)
    assert state(client, flow_run) == "Cancelled"
    put(client, flow_run, Crashed())  # who served it may say so after all
    check_once(client)
    assert state(client, flow_run) == "Crashed"


def test_what_was_killed_without_a_lease_is_crashed_and_a_driver_among_it_started_again(
    client: SyncPrefectClient, begin: Begin, api_url: str
) -> None:
    other, flow_run = begin("no-driver"), begin("early", restarts=1)
    for made in (other, flow_run):
        client.update_flow_run(made.id, tags=["cairn"])  # as it is before there is a lease
        process = subprocess.Popen(
            [sys.executable, "-c", EXECUTES, str(made.id), api_url], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "said\n"
        check_once(client)
        assert state(client, made) == "Running"
        kill(process)
    check_once(client)
    assert (state(client, other), state(client, flow_run)) == ("Crashed", "AwaitingRetry")
    put(client, flow_run, Pending())
    put(client, flow_run, Running())
    check_once(client)
    assert state(client, flow_run) == "Running", "the new process has yet to say that it is there"


def test_what_was_taken_up_and_never_begun_is_scheduled_again(
    client: SyncPrefectClient, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow_run = begin("submitted")
    put(client, flow_run, Pending(name="Submitting"))
    check_once(client)
    assert state(client, flow_run) == "Submitting"
    monkeypatch.setattr(watching, "START_TIMEOUT", -1.0)
    check_once(client)
    assert state(client, flow_run) == "Scheduled"


def test_a_run_of_the_same_name_in_another_store_is_left_alone(
    client: SyncPrefectClient, begin: Begin, tmp_path: Path
) -> None:
    flow_run = begin("elsewhere", restarts=1)
    kill(driver(tmp_path, "elsewhere"))
    client.update_flow_run(flow_run.id, tags=run_tags("elsewhere", f"{tmp_path}/other"))
    check_once(client)
    assert state(client, flow_run) == "Running"
