"""Ray for tests: one private cluster for the whole session, which every fleet started here shares.

`ray_cluster` keeps the cluster open between fleets, so that a test pays for its engines alone, which are forks as they
are on the cluster that a driver starts for itself. `fleet_config` builds the configuration of a fleet on a tiny model.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.reaper import end_processes_writing_in
from tests.waiting import wait_for

if TYPE_CHECKING:
    from cairn.engines.fleet.cluster import Cluster

NUM_CPUS = 16
"""CPUs that the session's cluster offers to reservations, whatever the machine has."""

WITHOUT_TOKEN = {"RAY_AUTH_MODE": "disabled"}
"""Environment of a cluster and its drivers where a token would have to be in the home folder."""

_RAY = str(Path(sys.executable).parent / "ray")


@pytest.fixture(scope="session")
def ray_cluster() -> "Iterator[Cluster]":
    import ray  # tests without it need not wait

    from cairn.engines.fleet.cluster import Cluster
    from cairn.engines.fleet.warm import WarmProcess

    engines = ["cairn.engines.rollout.transformers.engine", "cairn.engines.training.torch.engine"]
    cluster = Cluster.open(
        None,
        num_cpus=NUM_CPUS,
        object_store_memory=512 * 1024**2,
        timeout=240,
        make_warm=lambda: WarmProcess(engines, num_threads=1),
    )

    end_warm_process = cluster.start_workers_with

    def require_forks(num_threads: int | None) -> None:
        """Engines with GPUs are no forks; where there is none, engines of all later tests would be no forks either."""
        assert num_threads == 1 or "GPU" in ray.cluster_resources(), "the cluster would end its warm process"
        end_warm_process(num_threads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "start_workers_with", require_forks)
        yield cluster
    cluster.close()


@contextmanager
def ray_head(*options: str, num_cpus: int = 8, environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """A cluster that someone started on purpose, with further options and variables. Yields its address."""
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as folder:
        try:
            head = ("--head", "--port=0", "--include-dashboard=false", f"--temp-dir={folder}")
            with _ray_start(*head, *options, cpus=num_cpus, environment=environment):
                current = Path(folder) / "ray_current_cluster"
                wait_for(lambda: current.exists() and current.read_text())
                yield current.read_text().strip()
        finally:
            end_processes_writing_in(folder)


@contextmanager
def ray_machine(address: str, num_cpus: int = 8) -> Iterator[None]:
    """A further machine of that cluster, simulated by processes of this one, which end with its head."""
    with _ray_start(f"--address={address}", cpus=num_cpus):
        yield


@contextmanager
def _ray_start(*options: str, cpus: int, environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    command = ["start", "--block", f"--num-cpus={cpus}", "--object-store-memory=200000000", "--disable-usage-stats"]
    process = subprocess.Popen(
        [_RAY, *command, *options],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait(60)


def drain(address: str, node: str, seconds: int) -> None:
    """Tell a cluster that it will lose a machine, as an autoscaler does."""
    notice = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    command = [_RAY, "drain-node", "--address", address, "--node-id", node, *notice]
    subprocess.run([*command, "--deadline-remaining-seconds", str(seconds)], check=True, capture_output=True)


def fleet_config(model: Path | str, **sections: dict[str, Any]) -> RunConfig:
    """One rollout engine and one training rank, with deadlines that suit a tiny model; sections override."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "data": {"path": "train.jsonl"},
        "rollout": {
            "num_rollout": 4,
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 24,
            "timeout": 120,
        },
        "training": {"num_threads": 1, "lr": 1e-2, "timeout": 120},
        "fleet": {"start_timeout": 240, "call_timeout": 60, "update_weight_buffer_size": 64 * 1024},
    }
    return RunConfig.model_validate({name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}})
