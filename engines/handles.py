"""What the driver holds of its engines: typed calls with a deadline each, and the way to replace an engine that failed.

Actor calls are made at most once. A call that failed may have happened or not; what the engine then holds is found out
by asking it for its weight version or position, never assumed.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from configs.schema.operations import FleetConfig
from engines.calls import Deadline, result
from engines.cluster import require_cluster
from engines.errors import ClusterLost, EngineDied, EngineError, EngineTimeout

CONTROL = "control"
"""Concurrency group of the calls that an actor answers while it works: health, versions, abort."""


LOGS = Path(".cairn/engines")
"""Logs of servers, below the driver's working directory, on the machine of their actor."""


class Actor:
    """A named Ray actor in its bundle of a placement group, created as often as it is needed."""

    def __init__(self, name: str, create: "Callable[[], ray.actor.ActorHandle]") -> None:
        self.name = name
        self._create = create
        self._handle: ray.actor.ActorHandle | None = None

    def find(self) -> bool:
        """Take over the actor that has this name, if there is one."""
        require_cluster()
        try:
            self._handle = ray.get_actor(self.name)
        except ValueError:
            return False
        return True

    def create(self, deadline: Deadline) -> None:
        """Replace the actor that has this name, if any, by a new one, which may have to wait for its bundle."""
        self.kill()
        while self.find():
            self.kill()
            if not deadline.remaining:
                raise EngineTimeout(f"{self.name}: its predecessor was not removed within {deadline.seconds:g} s")
            time.sleep(0.01)
        self._handle = self._create()

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        if self._handle is not None:
            with contextlib.suppress(ClusterLost):  # then it is gone
                require_cluster()
                ray.kill(self._handle)
            self._handle = None

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method; returns what Ray's `.remote()` returns."""
        require_cluster()
        if self._handle is None:
            raise EngineDied(f"{self.name} was killed and has not been started again")
        return getattr(self._handle, method).options(**options).remote(*args)


def log_of(actor: Actor) -> Path:
    """Where a server of the actor logs."""
    return Path(LOGS, f"{actor.name.replace(':', '-')}.log").absolute()


class EngineHandle:
    """One engine: an actor, or several that are its ranks and live and die together. Threads may share it."""

    def __init__(self, name: str, actors: Sequence[Actor], fleet: FleetConfig) -> None:
        self.name = name
        """Name within the fleet; those of the actors also tell whose fleet."""
        self._actors = actors
        self._fleet = fleet
        self._replacing = threading.RLock()
        self.restarts = 0
        """How often this driver replaced the engine."""
        self.make_room: Callable[[], None] = lambda: None
        """Called before a restart: takes the memory that the engine shares from those who have it."""
        self._suspect = False
        """Set where the engine may be hung, or its ranks apart: it answers, perhaps, but is of no use."""

    def start(self, deadline: Deadline, *, adopt: bool = False) -> None:
        """Make the engine's actors; with `adopt`, keep those that an earlier driver left if all of them answer.

        Raises BadModel, EngineDied, EngineTimeout.
        """
        with self._replacing:
            self._suspect = True  # until it is up: an actor whose engine did not start answers too
            if not (adopt and self._adopted()):
                for actor in self._actors:
                    actor.create(deadline)
                self._make_engine(deadline)
            self._suspect = False

    def restart(self) -> None:
        """Kill the engine's actors, even hung ones, and start new ones in their place: at weight version 0.

        Raises BadModel, EngineDied, EngineTimeout.
        """
        self.make_room()
        self.restarts += 1
        self.start(Deadline(self._fleet.start_timeout))

    def ensure_alive(self) -> None:
        """Restart the engine if an actor of it is dead, or does not answer, or did not end a call in time."""
        with self._replacing:
            if not self._suspect:
                try:
                    self.health()
                    return
                except (EngineDied, EngineTimeout):
                    pass
            self.restart()

    def health(self) -> dict[str, Any]:
        """What the engine says of itself (its first rank, where there are several), the `pids` of its actors, and its
        `restarts`.

        Answered while the engine works too. Raises EngineDied or EngineTimeout if one of its actors does not answer.
        """
        deadline = Deadline(self._fleet.call_timeout)
        refs = [actor.call("health", concurrency_group=CONTROL) for actor in self._actors]
        found = [self._result(ref, deadline, actor, "health") for ref, actor in zip(refs, self._actors, strict=True)]
        return {**found[0], "pids": [health["pid"] for health in found], "restarts": self.restarts}

    def kill(self) -> None:
        """End the engine's actors for good."""
        for actor in self._actors:
            actor.kill()

    def _make_engine(self, deadline: Deadline) -> None:
        raise NotImplementedError

    def _host(self, actor: Actor, deadline: Deadline) -> str:
        """Address on which a server of the actor listens. On a cluster of this machine nobody else need reach it."""
        if self._fleet.ray_address is None:
            return "127.0.0.1"
        found: str = self._result(actor.call("host"), deadline, actor, "host")
        return found

    def _adopted(self) -> bool:
        if not all(actor.find() for actor in self._actors):
            return False
        try:
            self.health()
        except EngineError:
            return False
        return True

    def _result(self, ref: Any, deadline: Deadline, actor: Actor, method: str) -> Any:
        try:
            return result(ref, deadline, f"{actor.name}.{method}()")
        except EngineTimeout:
            self._suspect = True
            raise
