"""Ray for tests: one private cluster for the whole session, which every fleet started here shares.

`ray_cluster` keeps the cluster open between fleets, so that a test pays for its engines alone. `fleet_config` builds
the configuration of a fleet on a tiny model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from configs.schema.run import RunConfig

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
