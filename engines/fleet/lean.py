"""What a cluster of one driver does without: Ray's dashboard, its autoscaler, and what prints the logs of workers; and
how its workers start.

The former serve people and machines that such a cluster never meets, and take half of the CPU time of its start (4.6 s
of 9.2), of which a machine with few cores has none to spare then. Ray has no options for either: what is changed here
are private names of its, which `tests/engines/fleet/test_lean.py` looks for.
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
    """Workers of clusters that Ray starts within are forks of the warm process at this address; see
    cairn.engines.fleet.warm."""
    launcher = {"SETUP_WORKER_FILENAME": launch.__file__}  # joined to Ray's folder, and absolute
    # Stays: threads that read the whole environment meanwhile, as Prefect's does, fail at a variable that goes.
    os.environ[launch.ADDRESS] = address
    with _changed(ray._private.ray_constants, launcher):
        yield


@contextmanager
def only_what_runs_actors() -> Iterator[None]:
    """Clusters that Ray starts within have a head, a raylet with its agents, and workers. The agents are those of an
    installation without the dashboard's packages."""
    missing = ImportError("a cluster of one driver has no dashboard")
    unwanted = dict.fromkeys(("start_monitor", "start_api_server", "start_log_monitor"), _nothing)
    agents = {"get_dashboard_dependency_error": lambda: missing}
    with _changed(Node, unwanted), _changed(ray._private.utils, agents):
        yield


def _changed(owner: Any, values: dict[str, Any]) -> AbstractContextManager[Any]:
    """With these values where Ray has the names: where it has not, it starts as it does by itself."""
    found = {name: value for name, value in values.items() if hasattr(owner, name)}
    return patch.multiple(owner, **found) if found else nullcontext()


def _nothing(node: Node, **options: Any) -> None:
    """In place of starting a process."""
