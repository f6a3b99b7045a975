"""What a cluster of one driver does without: Ray's dashboard, its autoscaler, and what prints the logs of workers.

They serve people and machines that such a cluster never meets, and take half of the CPU time of its start (4.6 s of
9.2), of which a machine with few cores has none to spare then.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import ray._private.utils
from ray._private.node import Node


@contextmanager
def only_what_runs_actors() -> Iterator[None]:
    """Clusters that Ray starts within have a head, a raylet with its agents, and workers. Ray has no options for it;
    the agents are those of an installation without the dashboard's packages."""
    missing = ImportError("a cluster of one driver has no dashboard")
    with (
        patch.multiple(Node, start_monitor=_nothing, start_api_server=_nothing, start_log_monitor=_nothing),
        patch.object(ray._private.utils, "get_dashboard_dependency_error", lambda: missing),
    ):
        yield


def _nothing(node: Node, **options: Any) -> None:
    """In place of starting a process."""
