"""Where actors go: one Ray placement group a role, with a bundle for each of its actors."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engines.calls import Deadline
from engines.cluster import NAMESPACE, Cluster, ClusterError
from engines.handles import CONTROL, Actor

LEAST_CPUS = 0.001
"""A bundle must not be empty, even for actors that reserve nothing."""


@dataclass(frozen=True)
class Bundle:
    """What one actor reserves."""

    num_cpus: float
    num_gpus: float = 0
    guest_cpus: float = 0
    """Further CPUs, of actors that are placed in it beside the one it is made for."""

    @property
    def resources(self) -> dict[str, float]:
        """In Ray's words."""
        gpus = {"GPU": self.num_gpus} if self.num_gpus else {}
        return {"CPU": max(self.num_cpus + self.guest_cpus, LEAST_CPUS), **gpus}

    def __str__(self) -> str:
        return f"({self.num_cpus:g} CPU, {self.num_gpus:g} GPU)"


@dataclass(frozen=True)
class Role:
    """What the actors of one role need."""

    name: str
    actor_class: type
    bundles: tuple[Bundle, ...]
    """One for each actor."""
    num_threads: int
    digest: str
    """Of everything that its actors are made from: only equal ones are taken over from an earlier driver."""
    options: str
    """The options that say how much it asks for, for messages."""
    host: "Role | None" = None
    """The role in whose bundles its actors are guests: they reserve no GPU and have those of their hosts in turn."""
    host_bundles: tuple[int, ...] = ()
    """For each of its actors the bundle of the host."""

    @property
    def num_cpus(self) -> float:
        """CPUs that it reserves; those of guests are their host's."""
        return 0 if self.host is not None else sum(bundle.resources["CPU"] for bundle in self.bundles)

    def __str__(self) -> str:
        return f"{self.name} {' + '.join(f'{count} × {bundle}' for bundle, count in Counter(self.bundles).items())}"


class Placement:
    """The placement groups of a fleet."""

    def __init__(self, fleet_name: str, roles: Sequence[Role], cluster: Cluster, deadline: Deadline) -> None:
        """Reserve the bundles of all roles, or take over those of an earlier driver of the same name.

        Raises:
            ClusterError: the cluster has no room by the deadline, or never will.
        """
        roles = [role for role in roles if role.host is None]
        self._cluster = cluster
        self._prefix = f"cairn:{fleet_name}"
        self._lifetime = "detached" if cluster.joined else None
        names = {role.name: f"{self._prefix}:{role.name}:{role.digest}" for role in roles}
        kept = _groups(lambda name: name in names.values())
        _remove(_groups(lambda name: name.startswith(f"{self._prefix}:") and name not in names.values()), deadline)
        if not cluster.joined:
            _require_capacity(roles)
        self._groups: dict[str, PlacementGroup] = {
            role.name: kept.get(names[role.name])
            or placement_group(
                [bundle.resources for bundle in role.bundles], "PACK", names[role.name], lifetime=self._lifetime
            )
            for role in roles
        }
        for group in self._groups.values():
            if not group.wait(deadline.remaining):
                self.remove(Deadline(10))
                raise ClusterError(_no_room(roles, f"did not make room within {deadline.seconds:g} s"))

    def actors(self, role: Role) -> list[Actor]:
        """The role's actors, none of them created yet."""
        return [self._actor(role, index) for index in range(len(role.bundles))]

    def remove(self, deadline: Deadline) -> None:
        """Give the bundles back; what still runs in them is killed."""
        if self._cluster.lost is not None:
            return
        _remove({group.id.hex(): group for group in self._groups.values()}, deadline)

    def _actor(self, role: Role, index: int) -> Actor:
        name, bundle = f"{self._prefix}:{role.name}:{index}", role.bundles[index]
        host, place = (role, index) if role.host is None else (role.host, role.host_bundles[index])

        def create() -> "ray.actor.ActorHandle":
            actor_class: Any = ray.remote(concurrency_groups={CONTROL: 1})(role.actor_class)  # type: ignore[call-overload]
            options = actor_class.options(
                name=name,
                namespace=NAMESPACE,
                lifetime=self._lifetime,
                num_cpus=max(bundle.num_cpus, LEAST_CPUS),
                num_gpus=bundle.num_gpus if role.host is None else 0,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._groups[host.name], place),
            )
            return options.remote(role.num_threads)

        return Actor(name, create)


def _groups(wanted: Callable[[str], bool]) -> dict[str, PlacementGroup]:
    """Placement groups that have a wanted name and are not removed, by name."""
    table = placement_group_table().values()
    names = [entry["name"] for entry in table if entry["state"] != "REMOVED" and wanted(entry["name"])]
    return {name: ray.util.get_placement_group(name) for name in names}


def _remove(groups: dict[str, PlacementGroup], deadline: Deadline) -> None:
    for group in groups.values():
        remove_placement_group(group)
    for name, group in groups.items():
        while placement_group_table(group)["state"] != "REMOVED":
            if not deadline.remaining:
                raise ClusterError(f"Ray did not remove the placement group {name} within {deadline.seconds:g} s")
            time.sleep(0.01)


def _require_capacity(roles: Sequence[Role]) -> None:
    """A cluster of this machine alone does not grow; its CPUs are as many as were asked for."""
    if sum(bundle.num_gpus for role in roles for bundle in role.bundles) > ray.cluster_resources().get("GPU", 0):
        raise ClusterError(_no_room(roles, "has too few GPUs"))


def _no_room(roles: Sequence[Role], problem: str) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    has = ", ".join(f"{total.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in ("CPU", "GPU"))
    return (
        f"The Ray cluster {problem}: asked were {' and '.join(map(str, roles))}; it has {has}. Add nodes, free what "
        f"others hold, or lower {', '.join(role.options for role in roles)}"
    )
