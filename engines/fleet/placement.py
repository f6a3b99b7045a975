"""Placement of actors: one Ray placement group for each role, whose bundles hold the actors that must stay together."""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cairn.configs.digest import canonical_json
from cairn.engines.fleet.calls import Deadline
from cairn.engines.fleet.cluster import NAMESPACE, Cluster, ClusterError, machine_resources, require_cluster
from cairn.engines.fleet.fencing import NO_CLAIM, Tenure
from cairn.engines.fleet.handles import CONTROL, SAVING, SENDING, STORING, UPDATING, Actor
from cairn.engines.fleet.roles import LEAST_CPUS, ActorRole, BundlePlace, Slot, arrange, query_places, room_problem
from cairn.storage.records import code_version

LOOK_INTERVAL = 0.1
"""Seconds between two checks of bundles that have no machine yet."""


@dataclass
class _Group:
    """The placement group of a role, and the last known places of its bundles."""

    role: ActorRole
    name: str
    handle: PlacementGroup
    where: dict[int, BundlePlace] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    """For each of the role's bundles, in the order of its actors, the number of the Ray bundle that serves as it."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def replace(self, handle: PlacementGroup) -> None:
        """Use another placement group in place of one that is gone."""
        self.handle, self.where, self.order = handle, {}, ()

    def locate(self, nodes: Mapping[int, str], actor: int, deadline: Deadline) -> bool:
        """Determine the places of bundles that are on these machines. Returns whether the actor's bundle is among them;
        at first, whether all bundles are. Raises RayError where a machine was lost meanwhile."""
        bundles = self.role.bundles
        needed = {self.order[self.role.bundle_of(actor)[0]]} if self.order else set(range(len(bundles)))
        if not needed <= nodes.keys():
            return False
        moved = {b: node for b, node in nodes.items() if b not in self.where or self.where[b].node != node}
        if moved:
            self.where |= query_places(
                self.handle, moved, {b: bundles[b].resources.get("GPU", 0) for b in moved}, deadline
            )
            self.order = arrange(bundles, self.where, self.order, moved)
        return True

    def slots(self, actors: range) -> list[Slot]:
        """Return the slots of actors that share a bundle."""
        place, first = self.role.bundle_of(actors.start)
        located, each = self.where[self.order[place]], round(self.role.bundles[place].num_gpus)
        numbers = (actor - first for actor in actors)
        devices = [located.gpu_ids[n * each : (n + 1) * each] if each else located.gpu_ids for n in numbers]
        return [Slot(self.order[place], located.node, located.address, own) for own in devices]


class Placement:
    """The placement groups of a fleet."""

    def __init__(
        self,
        fleet_name: str,
        roles: Sequence[ActorRole],
        cluster: Cluster,
        deadline: Deadline,
        tenure: Tenure | None = None,
        *,
        joining: Sequence[ActorRole] = (),
        at_least: int = 0,
    ) -> None:
        """Reserve the bundles of all roles, or take over those of an earlier driver of the same name. With a `tenure`
        they outlive this process, on a cluster that does.

        Args:
            joining: further roles. Placement waits for `at_least` of them. The others stay requested, which an
                autoscaler sees, and are placed when there is room: see `nodes_of`.

        Raises:
            ClusterError: the cluster has no room by the deadline, or never will.
            LeaseLost: another driver has the fleet.
        """
        needed = [*(role for role in roles if role.host is None), *joining[:at_least]]
        # Large bundles first: no machine has room for them once small ones are everywhere.
        needed.sort(key=_largest_bundle, reverse=True)
        roles = [*needed, *joining[at_least:]]
        self._cluster = cluster
        self._prefix = f"cairn:{fleet_name}"
        self._tenure = tenure if cluster.joined else None
        self._lifetime = "detached" if self._tenure is not None else None
        names = {role.name: f"{self._prefix}:{role.name}:{role.digest}-{_kind(role)}" for role in roles}
        existing = _groups(lambda name: name in names.values())
        self.require_held()
        _remove(_groups(lambda name: name.startswith(f"{self._prefix}:") and name not in names.values()), deadline)
        if not cluster.joined:
            _require_capacity(needed)
        if problem := room_problem(needed, machine_resources()):
            raise ClusterError(_no_room(needed, problem))
        self._joining = {role.name for role in joining}
        self._groups: dict[str, _Group] = {}
        for role in roles:
            name = names[role.name]
            self._groups[role.name] = _Group(role, name, existing.get(name) or self._reserve(role, name))
        waited = all(self._groups[role.name].handle.wait(deadline.remaining) for role in needed if role not in joining)
        if not (waited and self._wait_until_placed(joining, at_least, deadline)):
            self.require_held()  # a later driver may have them by now, and wait for the same room
            self.remove(Deadline(10))
            raise ClusterError(_no_room(needed, f"did not make room within {deadline.seconds:g} s"))

    def require_held(self) -> None:
        """Raise LeaseLost if another driver may have the groups by now."""
        if self._tenure is not None:
            self._tenure.check()

    def nodes(self) -> set[str]:
        """Return the ids of the nodes of all bundles, except those of joining roles."""
        groups = [group for name, group in self._groups.items() if name not in self._joining]
        tables = [placement_group_table(group.handle) for group in groups]
        return {node for table in tables for node in table.get("bundles_to_node_id", {}).values()}

    def nodes_of(self, role: ActorRole) -> set[str] | None:
        """Return the ids of the nodes of all bundles of a role; None while one has no node."""
        table = placement_group_table(self._groups[role.name].handle)
        nodes = set(table.get("bundles_to_node_id", {}).values())
        return nodes if table.get("state") == "CREATED" and "" not in nodes else None

    def actors(self, role: ActorRole) -> list[Actor]:
        """Return the role's actors, none of them created yet."""
        return [self._actor(role, index) for index in range(role.num_actors)]

    def slot(self, role: ActorRole, index: int, deadline: Deadline) -> Slot:
        """Return where an actor of the role is to run. Ray is queried again for every bundle that has moved, and a
        removed group is made again. Actors whose bundles stayed keep their slots.

        Raises:
            ClusterError: the actor's machine was lost, and there is no room elsewhere by the deadline.
        """
        owner = role.host or role
        actors = role.hosts[index] if role.host is not None else range(index, index + 1)
        group = self._groups[owner.name]
        with group.lock:
            self._wait_until_located(group, actors.start, deadline)
            slots = group.slots(actors)
        if not role.bundles[role.bundle_of(index)[0]].num_gpus:
            return replace(slots[0], gpu_ids=())
        return replace(slots[0], gpu_ids=tuple(gpu for slot in slots for gpu in slot.gpu_ids))

    def remove(self, deadline: Deadline) -> None:
        """Release the bundles; actors that still run in them are killed."""
        if self._cluster.lost is not None:
            return
        _remove({group.name: group.handle for group in self._groups.values()}, deadline)

    def _wait_until_placed(self, roles: Sequence[ActorRole], count: int, deadline: Deadline) -> bool:
        """Wait until `count` of the roles have all their bundles. Returns whether they do by the deadline."""
        while sum(self.nodes_of(role) is not None for role in roles) < count:
            if not deadline.remaining:
                return False
            time.sleep(LOOK_INTERVAL)
        return True

    def _reserve(self, role: ActorRole, name: str) -> PlacementGroup:
        bundles = [bundle.resources for bundle in role.bundles]
        return placement_group(bundles, role.strategy, name, lifetime=self._lifetime)

    def _wait_until_located(self, group: _Group, actor: int, deadline: Deadline) -> None:
        """Wait until the actor's bundle is on a machine, and determine where."""
        while True:
            require_cluster()
            table = placement_group_table(group.handle)
            if table.get("state", "REMOVED") == "REMOVED":
                self.require_held()
                group.replace(self._reserve(group.role, group.name))
                continue
            # For a bundle whose machine was lost, Ray reports "" until the bundle has another one.
            nodes = {bundle: node for bundle, node in table["bundles_to_node_id"].items() if node}
            with suppress(RayError):
                if group.locate(nodes, actor, deadline):
                    return
            if not deadline.remaining:
                problem = f"did not make room for {group.role.name} again within {deadline.seconds:g} s"
                raise ClusterError(_no_room([group.role], problem))
            time.sleep(LOOK_INTERVAL)

    def _actor(self, role: ActorRole, index: int) -> Actor:
        bundle = role.bundles[role.bundle_of(index)[0]]
        name = f"{self._prefix}:{role.name}:{index}"

        def create(deadline: Deadline) -> "ray.actor.ActorHandle":
            slot = self.slot(role, index, deadline)
            group = self._groups[(role.host or role).name].handle
            groups = {CONTROL: 1, SENDING: 1, UPDATING: 1, SAVING: 1, STORING: 1, **dict(role.groups)}
            actor_class: Any = ray.remote(concurrency_groups=groups)(role.actor_class)  # type: ignore[call-overload]
            options = actor_class.options(
                name=name,
                namespace=NAMESPACE,
                lifetime=self._lifetime,
                num_cpus=max(bundle.num_cpus, LEAST_CPUS),
                num_gpus=0,  # its bundle has reserved them, and its slot names them
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, slot.bundle),
            )
            return options.remote(NO_CLAIM if self._tenure is None else self._tenure.claim, role.num_threads, slot)

        return Actor(name, create, lambda deadline: self.slot(role, index, deadline), self._tenure)


def _largest_bundle(role: ActorRole) -> tuple[float, float]:
    resources = [bundle.resources for bundle in role.bundles]
    return max(each.get("GPU", 0) for each in resources), max(each["CPU"] for each in resources)


def _kind(role: ActorRole) -> str:
    """Return the digest of the bundles and of the version of the code: a different reservation needs another group, and
    actors that run other code may not know the calls of this driver."""
    made_of = [[bundle.resources for bundle in role.bundles], code_version().model_dump()]
    return hashlib.sha256(canonical_json(made_of)).hexdigest()[:8]


def _groups(wanted: Callable[[str], bool]) -> dict[str, PlacementGroup]:
    """Return the placement groups that have a wanted name and are not removed, by name."""
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


def _require_capacity(roles: Sequence[ActorRole]) -> None:
    """Raise ClusterError if there are too few GPUs. A cluster of this machine alone does not grow; it has as many CPUs
    as were requested."""
    wanted = sum(bundle.resources.get("GPU", 0) for role in roles for bundle in role.bundles)
    if wanted > ray.cluster_resources().get("GPU", 0):
        raise ClusterError(_no_room(roles, "has too few GPUs"))


def _no_room(roles: Sequence[ActorRole], problem: str) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    has = ", ".join(f"{total.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in ("CPU", "GPU"))
    return (
        f"The Ray cluster {problem}: {' and '.join(map(str, roles))} were requested; it has {has}. Add nodes, end "
        f"other work, or lower {', '.join(role.options for role in roles)}"
    )
