"""What is changed of Ray where this driver starts it: private names, which an upgrade of Ray may move."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray._private.ray_constants
import ray._private.utils
from ray._private.node import Node

from cairn.engines.fleet.launch import ADDRESS
from cairn.engines.fleet.lean import workers_from

WORKERS = """
import json, os
import psutil, ray
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.warm import WarmProcess

warm = WarmProcess(["torch"], 1)
cluster = Cluster.open(None, num_cpus=4, object_store_memory=80 * 1024**2, timeout=240, make_warm=lambda: warm)

@ray.remote(num_cpus=0)
class Worker:
    def told(self):
        import numpy, torch
        return {
            "forked": os.getppid() == warm_pid,
            "threads": torch.get_num_threads(),
            "folder": os.getcwd(),
            "variable": os.environ["TOLD"],
            "random": numpy.random.random(),
        }

warm_pid = warm.pid
found = ray.get([worker.told.remote() for worker in [Worker.remote(), Worker.remote()]])
processes = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
cluster.start_workers_with(1)
found += [ray.get(Worker.remote().told.remote())]
cluster.start_workers_with(2)
found += [ray.get(Worker.remote().told.remote())]
cluster.close()
print(json.dumps({"found": found, "processes": processes}))
"""


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Node, "start_monitor"),
        (Node, "start_api_server"),
        (Node, "start_log_monitor"),
        (ray._private.utils, "get_dashboard_dependency_error"),
        (ray._private.ray_constants, "SETUP_WORKER_FILENAME"),
    ],
)
def test_ray_has_what_is_changed_of_it(owner: Any, name: str) -> None:
    assert hasattr(owner, name), f"this Ray has no {name}: find in engines/fleet/lean.py what it was changed for"


@pytest.fixture(scope="module")
def reported() -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-c", WORKERS], capture_output=True, text=True, env={**os.environ, "TOLD": "yes"}
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.slow
def test_workers_are_forks_of_a_process_that_has_made_the_imports(reported: dict[str, Any]) -> None:
    first, second, third, _ = reported["found"]
    for worker in (first, second, third):
        assert worker["forked"]
        assert worker["threads"] == 1
        assert worker["variable"] == "yes"
        assert worker["folder"] == os.getcwd()
    assert len({worker["random"] for worker in reported["found"]}) == 4


@pytest.mark.slow
def test_workers_of_another_number_of_threads_start_by_themselves(reported: dict[str, Any]) -> None:
    assert not reported["found"][-1]["forked"]


@pytest.mark.slow
def test_a_cluster_of_one_driver_has_no_dashboard_and_no_autoscaler(reported: dict[str, Any]) -> None:
    processes = "\n".join(reported["processes"])
    assert "raylet" in processes
    for unwanted in ("dashboard.py", "monitor.py"):
        assert unwanted not in processes


def test_the_environment_may_be_read_while_workers_are_told_of_the_warm_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            assert "PATH" in dict(os.environ)

    with ThreadPoolExecutor(1) as reading:
        read_on = reading.submit(read)
        for number in range(2000):
            with workers_from(str(number)):
                assert os.environ[ADDRESS] == str(number)
        over.set()
        read_on.result(60)
