"""Roles: what the actors of a fleet need, whether machines have room for them, and where they run."""

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cairn.engines.fleet.calls import Deadline

# Machine and devices of each actor of a placement group: queried from Ray, and put in order.
#
# Ray promises that a bundle is on one machine, but not which bundle is where: bundles with consecutive numbers may be
# on distant machines. So actors that must be together share one bundle. Bundles are assigned to ranks in the order of
# machine and device, so that rank r and rank r + 8 have the same device of two machines of 8, which share a network's
# switch.


@dataclass(frozen=True)
class BundlePlace:
    """Place of a bundle."""

    node: str
    """Ray's id of the machine."""
    address: str
    """Address of the machine within the cluster."""
    gpu_ids: tuple[str, ...] = ()
    """Devices of the bundle on that machine, in the machine's order, in the format of CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True)
class Slot:
    """Place of an actor."""

    bundle: int
    """Number of the bundle in the placement group."""
    node: str
    address: str
    gpu_ids: tuple[str, ...]
    """The only devices that the actor uses."""


def query_places(
    group: PlacementGroup, nodes: Mapping[int, str], num_gpus: Mapping[int, float], deadline: Deadline
) -> dict[int, BundlePlace]:
    """Return where bundles are, and which GPUs Ray reserved for them there.

    The bundles of one machine are queried one after the other, by a process that is reused. Machines are queried at the
    same time.

    Args:
        nodes: the node on which each bundle was seen.
        num_gpus: GPUs of each bundle. Bundles without GPUs are not queried.

    Raises:
        RayError: a machine was lost meanwhile, or did not respond in time.
    """
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    on_machine = defaultdict(list)
    for bundle, node in nodes.items():
        if num_gpus[bundle]:
            on_machine[node].append(bundle)
    places = {bundle: BundlePlace(node, addresses[node]) for bundle, node in nodes.items()}
    for turn in zip_longest(*on_machine.values()):
        bundles = [bundle for bundle in turn if bundle is not None]
        calls = [
            _own_place.options(
                num_gpus=num_gpus[bundle], scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)
            ).remote()
            for bundle in bundles
        ]
        places |= zip(bundles, ray.get(calls, timeout=deadline.remaining), strict=True)
    return places


@ray.remote(num_cpus=0, max_calls=0, max_retries=0)
def _own_place() -> BundlePlace:
    """Return the place of this bundle. This runs in the bundle itself, because Ray may have moved it since it was
    seen."""
    gpu_ids = sorted(map(str, ray.get_gpu_ids()), key=_in_order)
    return BundlePlace(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), tuple(gpu_ids))


def arrange(
    shapes: Sequence[Hashable], where: Mapping[int, BundlePlace], before: Sequence[int], moved: Iterable[int]
) -> tuple[int, ...]:
    """Assign bundles to positions, each to one of its own shape.

    Args:
        shapes: the shape of the bundle that each position takes, and of each bundle: position and bundle of one number
            have the same shape.
        where: the place of each bundle that has one.
        before: the bundle at each position until now; empty at first.
        moved: bundles that have moved. All others keep their positions, because their actors may live.

    Returns:
        The bundle at each position.
    """
    gone = set(moved) if before else set(range(len(shapes)))
    order = list(before) or list(range(len(shapes)))
    for shape in Counter(shapes):
        free = [position for position, bundle in enumerate(order) if shapes[bundle] == shape and bundle in gone]
        arrived = sorted((order[position] for position in free), key=lambda bundle: _where_in_order(where, bundle))
        for position, bundle in zip(free, arrived, strict=True):
            order[position] = bundle
    return tuple(order)


def _where_in_order(where: Mapping[int, BundlePlace], bundle: int) -> tuple[Any, ...]:
    """Return a sort key by machine and device. A bundle without a place comes last."""
    if (place := where.get(bundle)) is None:
        return (True, bundle)
    try:
        address = (0, int(ipaddress.ip_address(place.address)), "")
    except ValueError:
        address = (1, 0, place.address)
    return (False, address, place.node, [_in_order(gpu) for gpu in place.gpu_ids], bundle)


def _in_order(gpu_id: str) -> tuple[int, int, str]:
    """Return a sort key of a device. Its id is a number, or a name if the machine's owner assigned devices by name."""
    return (0, int(gpu_id), "") if gpu_id.isdecimal() else (1, 0, gpu_id)


LEAST_CPUS = 0.001
"""Least CPUs of a bundle. A bundle must not be empty, even for actors that reserve nothing."""


@dataclass(frozen=True)
class Bundle:
    """A reservation on one machine, for one actor, or for several that must be together."""

    num_cpus: float
    """CPUs of each actor."""
    num_gpus: float = 0
    """GPUs of each actor."""
    actors: int = 1
    guest_cpus: float = 0
    """Further CPUs, for guest actors that are placed in the bundle too."""

    @property
    def resources(self) -> dict[str, float]:
        """The reservation in Ray's format."""
        gpus = {"GPU": self.actors * self.num_gpus} if self.num_gpus else {}
        return {"CPU": self.actors * max(self.num_cpus, LEAST_CPUS) + self.guest_cpus, **gpus}

    def __str__(self) -> str:
        cpus = self.actors * self.num_cpus + self.guest_cpus
        return f"({cpus:g} CPU, {self.actors * self.num_gpus:g} GPU)"


@dataclass(frozen=True)
class ActorRole:
    """Requirements of the actors of one role."""

    name: str
    actor_class: type
    bundles: tuple[Bundle, ...]
    """Bundles in the order of the actors."""
    num_threads: int
    digest: str
    """Digest of everything that the actors are made from. A driver takes over an earlier driver's actors only if the
    digests are equal, and the versions of the code."""
    options: str
    """Names of the options that determine how much the role requests, for messages."""
    host: "ActorRole | None" = None
    """The role in whose bundles these actors are guests. Guests reserve no GPU, and use those of their hosts in
    turn."""
    hosts: tuple[range, ...] = ()
    """For each actor, the host's actors whose GPUs it uses; all in one bundle."""
    groups: tuple[tuple[str, int], ...] = ()
    """Concurrency groups besides those that all actors have, and the number of calls that each handles at a time."""
    strategy: str = "PACK"
    """Ray's strategy for the placement group."""

    @property
    def num_actors(self) -> int:
        """Number of actors in all bundles."""
        return sum(bundle.actors for bundle in self.bundles)

    @property
    def num_cpus(self) -> float:
        """CPUs that the role reserves. The host reserves those of guests."""
        return 0 if self.host is not None else sum(bundle.resources["CPU"] for bundle in self.bundles)

    def bundle_of(self, actor: int) -> tuple[int, int]:
        """Return the index of an actor's bundle, and that bundle's first actor."""
        first = 0
        for index, bundle in enumerate(self.bundles):
            if actor < first + bundle.actors:
                return index, first
            first += bundle.actors
        raise IndexError(f"{self.name} has no actor {actor}")

    def __str__(self) -> str:
        return f"{self.name} {' + '.join(f'{count} × {bundle}' for bundle, count in Counter(self.bundles).items())}"


def in_bundles(count: int, together: int, num_cpus: float, num_gpus: float) -> tuple[Bundle, ...]:
    """Return bundles for `count` actors, `together` consecutive ones in each; the last bundle has the rest."""
    whole, rest = divmod(count, together)
    return tuple(Bundle(num_cpus, num_gpus, size) for size in [together] * whole + [rest] * (rest > 0))


def room_problem(roles: Sequence[ActorRole], machines: Sequence[Mapping[str, float]]) -> str | None:
    """Return why machines that have enough in total lack the room where it must be together; None if they may have it.

    Args:
        machines: total resources of each machine, in Ray's format.
    """
    for role in roles:
        for bundle, count in Counter(role.bundles).items():
            resources = bundle.resources
            total = {kind: sum(machine.get(kind, 0) for machine in machines) for kind in resources}
            holds = sum(min(int(m.get(kind, 0) / each + 1e-6) for kind, each in resources.items()) for m in machines)
            if holds < count and all(total[kind] >= count * each for kind, each in resources.items()):
                have = Counter(f"({m.get('CPU', 0):g} CPU, {m.get('GPU', 0):g} GPU)" for m in machines)
                return (
                    f"has no machines for {role.name}: {count} × {bundle} must each be on one machine, but the "
                    f"machines are {' + '.join(f'{number} × {kind}' for kind, number in have.items())}, with room for "
                    f"{holds}"
                )
    return None
