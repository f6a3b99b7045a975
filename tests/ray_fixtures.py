"""Ray for tests: one private cluster for the whole session, which every fleet started here shares.

`ray_cluster` keeps the cluster open between fleets, so that a test pays for its engines alone. `fleet_config` builds
the configuration of a fleet on a tiny model.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from configs.schema.run import RunConfig
from engines.reaper import end_processes_with_files_in
from tests.waiting import wait_for

if TYPE_CHECKING:
    from engines.cluster import Cluster

NUM_CPUS = 16
"""CPUs that the session's cluster offers to reservations, whatever the machine has."""


@pytest.fixture(scope="session")
def ray_cluster() -> "Iterator[Cluster]":
    from engines.cluster import Cluster  # tests without it need not wait for Ray's import

    cluster = Cluster.open(None, num_cpus=NUM_CPUS, object_store_memory=512 * 1024**2, timeout=240)
    yield cluster
    cluster.close()


@contextmanager
def ray_head(*options: str) -> Iterator[str]:
    """A cluster that someone started on purpose, with further options. Yields its address."""
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as folder:
        command = "start --head --block --port=0 --num-cpus=8 --object-store-memory=200000000 --disable-usage-stats"
        head = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "ray"),
                *command.split(),
                "--include-dashboard=false",
                f"--temp-dir={folder}",
                *options,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            current = Path(folder) / "ray_current_cluster"
            wait_for(lambda: current.exists() and current.read_text())
            yield current.read_text().strip()
        finally:
            head.kill()
            head.wait(60)
            end_processes_with_files_in(folder)


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
