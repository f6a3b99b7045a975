"""Machines with GPUs, simulated: raylets on this machine that count as many devices as they are told to.

What Ray does with placement groups is what it does on real machines; nobody computes on a device. Ray has one cluster a
process, so this one has a process of its own, to which tests send functions.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

import ray
from ray.cluster_utils import Cluster as RayCluster

from cairn.engines.fleet.calls import Deadline
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import roles_of
from cairn.engines.fleet.lean import only_what_runs_actors
from cairn.engines.fleet.placement import Placement
from cairn.engines.fleet.roles import Slot
from cairn.engines.rollout.plan import kind_of
from tests import ray_fixtures
from tests.ray_fixtures import fleet_config

Found = TypeVar("Found")

OBJECT_STORE = 80 * 1024**2
"""Bytes, the least that Ray takes."""

OPTIONS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "raylet_start_wait_time_s": 120,
}
"""A machine that is gone is missed after two seconds."""

_cluster: RayCluster
_machines: list[Any] = []


class Machines:
    """The simulated machines, as a test sees them."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def do(self, work: Callable[..., Found], *args: Any, **kwargs: Any) -> Found:
        """Call a function in the process that has joined their cluster."""
        return self._pool.submit(work, *args, **kwargs).result(580)

    def have(self, gpus: Sequence[int]) -> None:
        """One machine for each number of GPUs, in place of those that there are."""
        self.do(_have, gpus)


@contextmanager
def simulated_machines() -> Iterator[Machines]:
    """None at first."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start) as pool:
        try:
            yield Machines(pool)
        finally:
            pool.submit(_stop).result(120)


def slots(**sections: dict[str, Any]) -> dict[str, list[Slot]]:
    """Where a configuration's fleet would have its actors, which are not started: by role. Raises ClusterError."""
    config = fleet_config("model", **sections)
    roles = roles_of(config, kind_of(config.rollout.engine).plan(config.rollout, False), total_steps=1)
    placement = Placement("placed", roles, Cluster(_cluster.address), Deadline(30))
    try:
        return {role.name: [placement.slot(role, i, Deadline(60)) for i in range(role.num_actors)] for role in roles}
    finally:
        placement.remove(Deadline(60))


def address() -> str:
    """Of their cluster."""
    actual: str = _cluster.address
    return actual


def way_in() -> dict[str, str]:
    """Environment variables by which their cluster lets a driver in."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}


def lose_newest() -> None:
    """The machine that came last is gone, without a word."""
    lose(_machines[-1].node_id)


def lose(node: str) -> None:
    """The machine is gone, without a word."""
    (lost,) = (machine for machine in _machines if machine.node_id == node)
    _machines.remove(lost)
    _cluster.remove_node(lost, allow_graceful=False)


def drain(node: str, seconds: int) -> None:
    """Ray is told that the machine will be gone."""
    ray_fixtures.drain(_cluster.address, node, seconds)


def add(gpus: int) -> None:
    """Another machine."""
    with only_what_runs_actors():
        node = _cluster.add_node(wait=False, num_cpus=4 * gpus, num_gpus=gpus, object_store_memory=OBJECT_STORE)
    _machines.append(node)


def _start() -> None:
    global _cluster
    head = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
    with only_what_runs_actors():
        try:
            _cluster = RayCluster(initialize_head=True, head_node_args=head | {"_system_config": OPTIONS})
        except Exception:  # on a busy machine Ray gives up after 30 seconds; caches are warm then
            _cluster = RayCluster(initialize_head=True, head_node_args=head | {"_system_config": OPTIONS})
    ray.init(address=_cluster.address, namespace="cairn", log_to_driver=False, logging_level="ERROR")


def _have(gpus: Sequence[int]) -> None:
    while _machines:
        _cluster.remove_node(_machines.pop(), allow_graceful=True)
    for number in gpus:
        add(number)
    _cluster.wait_for_nodes()


def _stop() -> None:
    ray.shutdown()
    _cluster.shutdown()
