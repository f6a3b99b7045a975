"""What the actors of a fleet need, and whether machines have room for it."""

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

# On which machine and devices each actor of a placement group runs: asked of Ray, and put in order.
#
# Ray promises that a bundle lies on one machine, and nothing about which bundle lies where: neighbours in number may be
# machines apart. What must be together is therefore one bundle, and bundles are dealt to ranks in the order of machine
# and device, so that rank r and rank r + 8 have the same device of two machines of 8, which share a network's switch.


@dataclass(frozen=True)
class Where:
    """Where a bundle lies."""

    node: str
    """Ray's id of the machine."""
    address: str
    """The machine's, within the cluster."""
    gpu_ids: tuple[str, ...] = ()
    """Its devices on that machine, in the machine's order: what CUDA_VISIBLE_DEVICES takes."""


@dataclass(frozen=True)
class Slot:
    """Where an actor runs."""

    bundle: int
    """In the placement group."""
    node: str
    address: str
    gpu_ids: tuple[str, ...]
    """The devices that it uses, and no others."""


def ask(
    group: PlacementGroup, nodes: Mapping[int, str], num_gpus: Mapping[int, float], deadline: Deadline
) -> dict[int, Where]:
    """Where bundles lie, and which GPUs Ray reserved for them there.

    A machine is asked for its bundles one by one, by a process that stays for the next; machines at the same time.

    Args:
        nodes: on which each of them was seen.
        num_gpus: of each of them. One without is not asked.

    Raises:
        RayError: a machine was lost meanwhile, or did not answer in time.
    """
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    on_machine = defaultdict(list)
    for bundle, node in nodes.items():
        if num_gpus[bundle]:
            on_machine[node].append(bundle)
    found = {bundle: Where(node, addresses[node]) for bundle, node in nodes.items()}
    for turn in zip_longest(*on_machine.values()):
        asked = [bundle for bundle in turn if bundle is not None]
        calls = [
            _here.options(
                num_gpus=num_gpus[bundle], scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)
            ).remote()
            for bundle in asked
        ]
        found |= zip(asked, ray.get(calls, timeout=deadline.remaining), strict=True)
    return found


@ray.remote(num_cpus=0, max_calls=0, max_retries=0)
def _here() -> Where:
    """Asked of the bundle itself: Ray may have moved it since it was seen."""
    gpu_ids = sorted(map(str, ray.get_gpu_ids()), key=_in_order)
    return Where(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), tuple(gpu_ids))


def arrange(
    shapes: Sequence[Hashable], where: Mapping[int, Where], before: Sequence[int], moved: Iterable[int]
) -> tuple[int, ...]:
    """Deal bundles out to positions, each to one of its own shape.

    Args:
        shapes: of the bundle that each position takes, and of each bundle: position and bundle of one number are alike.
        where: of each bundle that lies anywhere.
        before: the bundle at each position until now; empty at first.
        moved: bundles that were not where they are. All others keep their positions, for their actors may live.

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


def _where_in_order(where: Mapping[int, Where], bundle: int) -> tuple[Any, ...]:
    """By machine and device; a bundle that lies nowhere comes last."""
    if (found := where.get(bundle)) is None:
        return (True, bundle)
    try:
        address = (0, int(ipaddress.ip_address(found.address)), "")
    except ValueError:
        address = (1, 0, found.address)
    return (False, address, found.node, [_in_order(gpu) for gpu in found.gpu_ids], bundle)


def _in_order(gpu_id: str) -> tuple[int, int, str]:
    """Devices have a number or, where the machine's owner gave them out by name, a name."""
    return (0, int(gpu_id), "") if gpu_id.isdecimal() else (1, 0, gpu_id)


LEAST_CPUS = 0.001
"""A bundle must not be empty, even for actors that reserve nothing."""


@dataclass(frozen=True)
class Bundle:
    """What is reserved on one machine: for one actor, or for several that must be on the same."""

    num_cpus: float
    """Of each actor."""
    num_gpus: float = 0
    """Of each actor."""
    actors: int = 1
    guest_cpus: float = 0
    """Further CPUs, of actors that are placed in it beside those that it is made for."""

    @property
    def resources(self) -> dict[str, float]:
        """In Ray's words."""
        gpus = {"GPU": self.actors * self.num_gpus} if self.num_gpus else {}
        return {"CPU": self.actors * max(self.num_cpus, LEAST_CPUS) + self.guest_cpus, **gpus}

    def __str__(self) -> str:
        cpus = self.actors * self.num_cpus + self.guest_cpus
        return f"({cpus:g} CPU, {self.actors * self.num_gpus:g} GPU)"


@dataclass(frozen=True)
class ActorRole:
    """What the actors of one role need."""

    name: str
    actor_class: type
    bundles: tuple[Bundle, ...]
    """In the order of its actors."""
    num_threads: int
    digest: str
    """Of everything that its actors are made from: only equal ones are taken over from an earlier driver."""
    options: str
    """The options that say how much it asks for, for messages."""
    host: "ActorRole | None" = None
    """The role in whose bundles its actors are guests: they reserve no GPU and have those of their hosts in turn."""
    hosts: tuple[range, ...] = ()
    """For each of its actors those of the host whose GPUs it has; all in one bundle."""
    groups: tuple[tuple[str, int], ...] = ()
    """Concurrency groups of its actors besides those of all, and the calls that each serves at a time."""
    strategy: str = "PACK"
    """Ray's, of its placement group."""

    @property
    def num_actors(self) -> int:
        """In all its bundles."""
        return sum(bundle.actors for bundle in self.bundles)

    @property
    def num_cpus(self) -> float:
        """CPUs that it reserves; those of guests are their host's."""
        return 0 if self.host is not None else sum(bundle.resources["CPU"] for bundle in self.bundles)

    def bundle_of(self, actor: int) -> tuple[int, int]:
        """The index of an actor's bundle, and the first actor in that."""
        first = 0
        for index, bundle in enumerate(self.bundles):
            if actor < first + bundle.actors:
                return index, first
            first += bundle.actors
        raise IndexError(f"{self.name} has no actor {actor}")

    def __str__(self) -> str:
        return f"{self.name} {' + '.join(f'{count} × {bundle}' for bundle, count in Counter(self.bundles).items())}"


def in_bundles(count: int, together: int, num_cpus: float, num_gpus: float) -> tuple[Bundle, ...]:
    """Bundles for `count` actors of which so many after one another must be together; the last one has the rest."""
    whole, rest = divmod(count, together)
    return tuple(Bundle(num_cpus, num_gpus, size) for size in [together] * whole + [rest] * (rest > 0))


def room_problem(roles: Sequence[ActorRole], machines: Sequence[Mapping[str, float]]) -> str | None:
    """Why machines that have enough in all do not have it where it must be together; None if they may have.

    Args:
        machines: what each has in all, in Ray's words.
    """
    for role in roles:
        for bundle, count in Counter(role.bundles).items():
            asked = bundle.resources
            total = {kind: sum(machine.get(kind, 0) for machine in machines) for kind in asked}
            holds = sum(min(int(m.get(kind, 0) / each + 1e-6) for kind, each in asked.items()) for m in machines)
            if holds < count and all(total[kind] >= count * each for kind, each in asked.items()):
                have = Counter(f"({m.get('CPU', 0):g} CPU, {m.get('GPU', 0):g} GPU)" for m in machines)
                return (
                    f"has no machines for {role.name}: {count} × {bundle} must each be on one machine, and they are "
                    f"{' + '.join(f'{number} × {kind}' for kind, number in have.items())}, with room for {holds}"
                )
    return None
