"""Whole drivers that are told to end, by each of those who may: they say so, and leave a run that goes on."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest
import yaml

from cairn.configs.schema.run import RunConfig
from cairn.flows.driver.signals import EXIT_CODE
from cairn.flows.iteration import iteration
from cairn.flows.orchestration.flow_runs import run_tags
from cairn.flows.orchestration.server import PREFECT_HOME, Server
from cairn.flows.reading.views import RunState, run_status
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import newest_lease
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from tests.background import Background, in_background
from tests.ray_fixtures import drain, ray_head, ray_machine
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests
from tests.waiting import wait_for

CAIRN = Path(sys.executable).with_name("cairn")
LONG = 30
"""Iterations of a run that nobody waits for."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    """With rollouts of a second, whose groups finish one after the other, and no checkpoint due before the end."""
    rollout = {"rollout_batch_size": 48, "n_samples_per_prompt": 4, "max_running_requests": 4}
    return tiny_config(tiny_assets, rollout={"num_rollout": LONG, **rollout})


def write_recipe(folder: Path, config: RunConfig, **sections: dict[str, Any]) -> str:
    fields = config.model_dump(mode="json")
    for name, options in sections.items():
        fields[name] |= options
    (folder / "whole.yaml").write_text(yaml.safe_dump(fields))
    return "whole.yaml"


def within_a_rollout(folder: Path, driver: Background | None = None) -> int:
    """Wait until groups of a later iteration than the first have finished, and return which; a driver that has ended
    says why."""
    parts = folder / "runs/whole/iterations"

    def rolling() -> int:
        if driver and driver.poll() is not None:
            raise AssertionError("the driver has ended: " + "".join(driver.communicate(timeout=60)))
        found = parts.glob("*/rollout/*/write_ahead/*.arrow")
        return max((int(part.relative_to(parts).parts[0]) for part in found), default=0)

    return cast(int, wait_for(rolling, 400))


@contextmanager
def everything_ends(folder: Path) -> Iterator[None]:
    """Every process that the run's driver has when the block begins is gone soon after it."""
    lease = newest_lease(open_store(str(folder)), "whole")
    assert lease is not None
    driver = psutil.Process(lease.holder.pid)
    processes = [driver, *driver.children(recursive=True)]
    assert len(processes) > 3, "with its engines"
    yield
    wait_for(lambda: not any(process.is_running() for process in processes))


def assert_preempted(folder: Path) -> int:
    """The run is given back as preempted, with its newest weights saved; returns their iteration."""
    store = open_store(str(folder))
    assert run_status(store, "whole").state is RunState.PREEMPTED
    ledger = Ledger.open(store, "whole")
    saved = [index for index in range(LONG) if ledger.find(index, Step.CHECKPOINT)]
    assert saved == [max(index for index in range(LONG) if ledger.find(index, Step.TRAIN))]
    return saved[0]


def assert_says_so(driver: Background, out: str, errors: str, command: str = "resume whole") -> None:
    assert driver.returncode == EXIT_CODE, out + errors
    message = rf"preempted; nothing committed is lost\. Continue with: (PYTHONPATH=\S+ )?cairn {command}\n$"
    assert re.search(message, errors), errors
    assert "Traceback" not in errors


def test_sigterm_ends_a_driver_in_a_scripts_background_and_the_run_is_resumed_to_the_same_bits(
    config: RunConfig, tmp_path: Path, api_url: str
) -> None:
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_rollout": 3})})
    with tiny_context(str(tmp_path / "undisturbed"), config) as (run, _):
        for index in range(3):
            iteration(run, DirectSteps(run), index)
        undisturbed = train_digests(run, range(3))
    recipe = write_recipe(tmp_path, config)
    with in_background(CAIRN, "train", recipe, cwd=tmp_path, PREFECT_API_URL=api_url) as driver:
        interrupted = within_a_rollout(tmp_path, driver)
        with everything_ends(tmp_path):
            driver.send_signal(signal.SIGTERM)
            out, errors = driver.communicate(timeout=120)
    assert_says_so(driver, out, errors)
    saved = assert_preempted(tmp_path)
    assert saved == interrupted - 1, "it waits for no rollout to end"
    with in_background(CAIRN, "resume", "whole", cwd=tmp_path, PREFECT_API_URL=api_url) as driver:
        out, errors = driver.communicate(timeout=400)
    assert driver.returncode == 0, out + errors
    assert f"from the checkpoint of iteration {saved}; 0 committed step(s) to replay" in out
    ledger = Ledger.open(open_store(str(tmp_path)), "whole")
    trained = [ledger.find(index, Step.TRAIN) for index in range(3)]
    assert [commit and commit.state_digest for commit in trained] == undisturbed


def cancel(api: httpx.Client, flow_run: str) -> None:
    """What the interface's Cancel button sends."""
    state = {"type": "CANCELLING", "name": "Cancelling", "message": "Cancelled from the UI"}
    api.post(f"/flow_runs/{flow_run}/set_state", json={"state": state, "force": True}).raise_for_status()


def is_cancelled(api: httpx.Client, flow_run: str) -> bool:
    return api.get(f"/flow_runs/{flow_run}").json()["state_name"] == "Cancelled"


def servers_of(driver: Background) -> list[psutil.Process]:
    """Prefect servers that a driver has started, in whatever way."""

    def serves(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return any(
                "cairn.flows.orchestration.server" in word or "prefect.server" in word for word in process.cmdline()
            )
        return False

    return [process for process in psutil.Process(driver.pid).children(recursive=True) if serves(process)]


def test_cancel_in_the_drivers_own_prefect_ends_it_when_a_person_started_it(config: RunConfig, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, config)
    with in_background(CAIRN, "train", recipe, cwd=tmp_path) as driver:
        within_a_rollout(tmp_path, driver)
        (server,) = servers_of(driver)
        (port,) = {listener.laddr.port for listener in server.net_connections() if listener.status == "LISTEN"}
        api = httpx.Client(base_url=f"http://127.0.0.1:{port}/api", timeout=60)
        wanted = {
            "flow_runs": {"tags": {"all_": sorted(run_tags("whole", str(tmp_path)))}},
            "flows": {"name": {"any_": ["train"]}},
        }
        (flow_run,) = api.post("/flow_runs/filter", json=wanted).json()
        with everything_ends(tmp_path):
            cancel(api, flow_run["id"])
            out, errors = driver.communicate(timeout=120)
        assert_says_so(driver, out, errors)
        assert "This run was cancelled in Prefect" in out + errors
    assert_preempted(tmp_path)
    second = Server(tmp_path / PREFECT_HOME)
    try:
        second.wait_ready()
        assert is_cancelled(httpx.Client(base_url=second.api_url, timeout=60), flow_run["id"])
    finally:
        second.stop()


SERVE = "from cairn.flows.train import train; train.serve(name='cancelled', print_starting_message=False)"


def test_cancel_in_prefect_ends_a_driver_that_prefect_started(
    config: RunConfig, tmp_path: Path, api_url: str, tiny_assets: Path
) -> None:
    environment = os.environ | {"PREFECT_API_URL": api_url, "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    with (
        (tmp_path / "server.log").open("ab") as log,
        httpx.Client(base_url=api_url, timeout=60) as api,
    ):
        command = [sys.executable, "-c", SERVE]
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            wanted = {"deployments": {"name": {"any_": ["cancelled"]}}}
            (deployment,) = wait_for(lambda: api.post("/deployments/filter", json=wanted).json())
            parameters = {"run": "whole", "store": str(tmp_path), "config": config.model_dump(mode="json")}
            created = api.post(f"/deployments/{deployment['id']}/create_flow_run", json={"parameters": parameters})
            flow_run = created.json()["id"]
            within_a_rollout(tmp_path)
            with everything_ends(tmp_path):
                cancel(api, flow_run)
                wait_for(lambda: is_cancelled(api, flow_run))
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # SIGTERM can find Prefect's runner at a lock that it holds itself
            server.wait()
    assert_preempted(tmp_path)


NODES = "import json, ray; ray.init({address!r}, logging_level='ERROR'); print(json.dumps(ray.nodes()))"


def machine_with_cpus(address: str) -> str | None:
    """Its id, once it has joined."""
    nodes = subprocess.check_output([sys.executable, "-c", NODES.format(address=address)], text=True)
    found = [node["NodeID"] for node in json.loads(nodes.splitlines()[-1]) if node["Resources"].get("CPU")]
    return found[0] if found else None


def test_a_driver_ends_when_ray_drains_a_machine_of_it(
    config: RunConfig, tmp_path: Path, api_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a token would have to be in the home folder
    with ray_head(num_cpus=0) as address, ray_machine(address):
        node = wait_for(lambda: machine_with_cpus(address))
        recipe = write_recipe(tmp_path, config, fleet={"ray_address": address})
        with in_background(CAIRN, "train", recipe, cwd=tmp_path, PREFECT_API_URL=api_url) as driver:
            within_a_rollout(tmp_path, driver)
            drain(address, node, 60)
            out, errors = driver.communicate(timeout=120)
        # No ledger may name a cluster's address, so a resume needs the recipe.
        assert_says_so(driver, out, errors, r"train whole\.yaml --run whole")
        assert "Ray drains a machine of this run" in out + errors
    assert_preempted(tmp_path)
