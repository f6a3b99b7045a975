"""Changes to Ray for a cluster of one driver: no dashboard, no autoscaler, no printing of workers' logs, and another
way to start workers.

The first three serve people and machines that such a cluster never meets. Without them a run's start takes a seventh
less CPU time (12.7 s in place of 14.5 s, `bench/start.py`), which a machine with few cores cannot spare then. This
module changes private names of Ray, which `tests/engines/fleet/test_lean.py` checks.

To ask of Ray: let `ray.init` pass on `no_monitor`, `include_log_monitor` and `setup_worker_path`, which its own
`RayParams` has, and start no API server where the dashboard is off. Then this module goes.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import ray._private.ray_constants
import ray._private.utils
from ray._private.node import Node

from cairn.engines.fleet import launch


@contextmanager
def workers_from(address: str) -> Iterator[None]:
    """Have the clusters that Ray starts in this context fork their workers from the warm process at this address; see
    cairn.engines.fleet.warm."""
    launcher = {"SETUP_WORKER_FILENAME": launch.__file__}  # joined to Ray's folder, and absolute
    # The variable stays set: threads that read the whole environment meanwhile, as Prefect's does, fail when one is
    # removed.
    os.environ[launch.ADDRESS] = address
    with _changed(ray._private.ray_constants, launcher):
        yield


@contextmanager
def only_what_runs_actors() -> Iterator[None]:
    """Have the clusters that Ray starts in this context consist of a head, a raylet with its agents, and workers. The
    agents are those of an installation without the dashboard's packages."""
    missing = ImportError("a cluster of one driver has no dashboard")
    unwanted = dict.fromkeys(("start_monitor", "start_api_server", "start_log_monitor"), _nothing)
    agents = {"get_dashboard_dependency_error": lambda: missing}
    with _changed(Node, unwanted), _changed(ray._private.utils, agents):
        yield


def _changed(owner: Any, values: dict[str, Any]) -> AbstractContextManager[Any]:
    """Patch the values whose names Ray has. Where Ray lacks a name, it starts as it does by default."""
    existing = {name: value for name, value in values.items() if hasattr(owner, name)}
    return patch.multiple(owner, **existing) if existing else nullcontext()


def _nothing(node: Node, **options: Any) -> None:
    """Do nothing, in place of starting a process."""
