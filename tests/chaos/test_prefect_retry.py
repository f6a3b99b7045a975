"""Retry in Prefect's interface goes on from the last commit."""

import json
import os
import signal
import subprocess
import sys
from uuid import UUID

import httpx
import pytest

from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import newest_lease
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from tests.chaos.oracle import unequal
from tests.chaos.runs import Disturbed
from tests.waiting import wait_for


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_retry_of_a_killed_train_flow_ends_in_the_undisturbed_state(
    disturbed: Disturbed, undisturbed: Disturbed
) -> None:
    environment = {**disturbed.whole_environment(), "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    command = [sys.executable, "-m", "tests.chaos.serve"]
    with (
        (disturbed.folder / "driver.log").open("ab") as log,
        httpx.Client(base_url=disturbed.environment["PREFECT_API_URL"]) as api,
    ):
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            wanted = {"deployments": {"name": {"any_": ["chaos"]}}}
            (deployment,) = wait_for(lambda: api.post("/deployments/filter", json=wanted).json())
            parameters = {
                "run": "run",
                "store": disturbed.store_url,
                "config": json.loads(disturbed.config_file.read_text()),
            }
            created = api.post(f"/deployments/{deployment['id']}/create_flow_run", json={"parameters": parameters})
            flow_run = f"/flow_runs/{UUID(created.json()['id'])}"
            wait_for(lambda: _committed(disturbed, 1, Step.TRAIN), 400)
            lease = newest_lease(open_store(disturbed.store_url), "run")
            assert lease is not None
            os.kill(lease.holder.pid, signal.SIGKILL)
            wait_for(lambda: api.get(flow_run).json()["state_name"] == "Crashed", 400)
            # What the interface's Retry button sends.
            retry = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
            api.post(f"{flow_run}/set_state", json={"state": retry, "force": True}).raise_for_status()
            wait_for(lambda: api.get(flow_run).json()["state_name"] == "Completed", 400)
        finally:
            server.terminate()
            server.wait(60)
    assert {commit.epoch for commit in disturbed.commits()} == {1, 2}
    assert unequal(disturbed, undisturbed) == []


def _committed(disturbed: Disturbed, index: int, step: Step) -> bool:
    try:
        ledger = Ledger.open(open_store(disturbed.store_url), "run")
    except FileNotFoundError:
        return False
    return ledger.find(index, step) is not None
