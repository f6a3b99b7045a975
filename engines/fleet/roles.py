"""What the actors of a fleet need, and whether machines have room for it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
