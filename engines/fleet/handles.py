"""The driver's handles on its engines: typed calls with a deadline each, and the replacement of a failed engine.

Actor calls are made at most once. A failed call may have taken effect or not. The driver never assumes what the engine
holds after it, but queries its weight version or position.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from cairn.configs.schema.operations import FleetConfig
from cairn.engines.fleet.calls import Deadline, result
from cairn.engines.fleet.cluster import require_cluster
from cairn.engines.fleet.fencing import NO_CLAIM, Callee, Tenure
from cairn.engines.fleet.roles import Slot
from cairn.engines.processes.fingerprint import combined
from cairn.engines.types.errors import BadModel, ClusterLost, EngineDied, EngineError, EngineTimeout, Superseded
from cairn.storage.records import Environment

CONTROL = "control"
"""Concurrency group of the calls that an actor handles while it works: health, versions, abort."""

UPDATING = "updating"
"""Concurrency group of the calls that replace a rollout engine's weights, which the engine may accept while it
generates."""

SENDING = "sending"
"""Concurrency group of broadcasts of copied weights, during which the trainer continues its work."""


TO_END = 10.0
"""Seconds that an actor gets to end by itself; after that it is killed."""

LOGS = Path(".cairn/engines")
"""Folder for logs of servers, below the driver's working directory, on the machine of their actor."""


class Actor:
    """A named Ray actor in its bundle of a placement group. The actor is created as often as it is needed."""

    def __init__(
        self,
        name: str,
        create: "Callable[[Deadline], ray.actor.ActorHandle]",
        slot: Callable[[Deadline], Slot],
        tenure: Tenure | None = None,
    ) -> None:
        """
        Args:
            slot: returns where the actor is to run.
            tenure: the driver's tenure, if other drivers may come to have the actor; see cairn.engines.fleet.fencing.
        """
        self.name = name
        self.slot = slot
        self._create = create
        self._tenure = tenure
        self._handle: ray.actor.ActorHandle | None = None

    def find(self) -> bool:
        """Take over the existing actor of this name. Returns whether there is one."""
        require_cluster()
        try:
            self._handle = ray.get_actor(self.name)
        except ValueError:
            return False
        return True

    def create(self, deadline: Deadline) -> None:
        """Replace the actor of this name, if any, by a new one, which may have to wait for its bundle. Raises LeaseLost
        if another driver has the actor."""
        self.kill()
        while True:
            while self.find():
                self.kill()
                if not deadline.remaining:
                    raise EngineTimeout(f"{self.name}: its predecessor was not removed within {deadline.seconds:g} s")
                time.sleep(0.01)
            self.require_held()
            try:
                self._handle = self._create(deadline)
                return
            except ValueError:  # another driver was faster to give an actor this name
                self.require_held()

    def kill(self) -> None:
        """End the process, whatever it is doing. If another driver has the actor, raises LeaseLost and leaves the actor
        alone."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        with contextlib.suppress(ClusterLost):  # then it is gone
            require_cluster()
            if not self._ends(handle):
                self.require_held()
                ray.kill(handle)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method; returns what Ray's `.remote()` returns. The result may be Superseded."""
        require_cluster()
        return self.callee.call(method, *args, **options)

    @property
    def callee(self) -> Callee:
        """The actor with this driver's claim, for this process and others. Raises EngineDied where there is no
        actor."""
        if self._handle is None:
            raise EngineDied(f"{self.name} was killed and has not been started again")
        return self._called(self._handle)

    def require_held(self) -> None:
        """Raise LeaseLost if another driver may have the actor by now."""
        if self._tenure is not None:
            self._tenure.check()

    def _called(self, handle: "ray.actor.ActorHandle") -> Callee:
        return Callee(handle, NO_CLAIM if self._tenure is None else self._tenure.claim)

    def _ends(self, handle: "ray.actor.ActorHandle") -> bool:
        """Return whether the actor has ended by itself, which it does only for the newest driver."""
        if self._tenure is None:
            return False  # nobody else has it: it need not be asked
        with contextlib.suppress(Superseded, EngineError):
            try:
                result(
                    self._called(handle).call("end", concurrency_group=CONTROL), Deadline(TO_END), f"{self.name}.end()"
                )
            except EngineDied:
                return True
        return False


def log_of(actor: Actor) -> Path:
    """Return the log file of the actor's server."""
    return Path(LOGS, f"{actor.name.replace(':', '-')}.log").absolute()


class EngineHandle:
    """An engine: one actor, or several that are its ranks and live and die together. Threads may share it."""

    def __init__(self, name: str, actors: Sequence[Actor], fleet: FleetConfig) -> None:
        self.name = name
        """Name within the fleet. The names of the actors also contain the name of the fleet."""
        self._actors = actors
        self._fleet = fleet
        self._replacing = threading.RLock()
        self.restarts = 0
        """Number of times that this driver replaced the engine."""
        self.make_room: Callable[[], None] = lambda: None
        """Callback before a restart. It takes the memory that the engine shares from the engines that have it."""
        self.tell: Callable[[str], None] = lambda sentence: None
        """Callback for a sentence on why the engine is replaced."""
        self._suspect = False
        """Whether the engine may be hung, or its ranks may have diverged. Such an engine may respond, but is of no
        use."""

    def start(self, deadline: Deadline, *, adopt: bool = False) -> None:
        """Make the engine's actors. With `adopt`, keep those of an earlier driver if all of them respond.

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
        """Kill the engine's actors, even hung ones, and start new ones in their place, at weight version 0.

        Raises BadModel, EngineDied, EngineTimeout.
        """
        self.make_room()
        self.restarts += 1
        self.start(Deadline(self._fleet.start_timeout))

    def ensure_alive(self) -> dict[str, Any]:
        """Return the engine's health. Restarts the engine first if it does not live, see `require_alive`."""
        with self._replacing:
            try:
                return self.require_alive()
            except (EngineDied, EngineTimeout) as error:
                self.tell(f"Engine {self.name} is restarted: {error}")
                self.restart()
                return self.health()

    def require_alive(self) -> dict[str, Any]:
        """Return the engine's health. Raises EngineDied or EngineTimeout if an actor of the engine is dead, does not
        respond, or did not end a call in time."""
        if self._suspect:
            raise EngineTimeout("a call of it failed, or did not end in time")
        return self.health()

    def health(self) -> dict[str, Any]:
        """Return the engine's health (that of its first rank, if there are several), the `pids` and `slots` of its
        actors, and its `restarts`.

        Works while the engine works too. Raises EngineDied or EngineTimeout if one of its actors does not respond.
        """
        deadline = Deadline(self._fleet.call_timeout)
        refs = [actor.call("health", concurrency_group=CONTROL) for actor in self._actors]
        found = [self._result(ref, deadline, actor, "health") for ref, actor in zip(refs, self._actors, strict=True)]
        of_all = {"pids": [health["pid"] for health in found], "slots": [health.pop("slot") for health in found]}
        return {**found[0], **of_all, "restarts": self.restarts}

    def kill(self) -> None:
        """End the engine's actors for good."""
        for actor in self._actors:
            actor.kill()

    def _make_engine(self, deadline: Deadline) -> None:
        raise NotImplementedError

    def _host(self, actor: Actor, deadline: Deadline) -> str:
        """Return the address on which an actor's server listens. On a cluster of this machine no other machine needs to
        reach it."""
        if self._fleet.ray_address is None:
            return "127.0.0.1"
        found: str = self._result(actor.call("host"), deadline, actor, "host")
        return found

    def _adopted(self) -> bool:
        if not all(actor.find() for actor in self._actors):
            return False
        deadline = Deadline(self._fleet.call_timeout)
        try:
            found: list[Slot] = self.health()["slots"]
            # The actors must be where this driver's placement has them, because it assigns bundles anew.
            return found == [actor.slot(deadline) for actor in self._actors]
        except EngineError:
            return False
        except Superseded:  # by a driver of a run of the same name that was deleted since, or of this one
            self._actors[0].require_held()
            return False

    def _result(self, ref: Any, deadline: Deadline, actor: Actor, method: str) -> Any:
        try:
            return result(ref, deadline, f"{actor.name}.{method}()")
        except EngineTimeout:
            self._suspect = True
            raise


class ModelHandle(EngineHandle):
    """An engine that computes with models."""

    def __init__(
        self,
        name: str,
        actors: Sequence[Actor],
        fleet: FleetConfig,
        folders: Mapping[str, str],
        digests: Mapping[str, str],
    ) -> None:
        """
        Args:
            folders: the engine's model folders, by name.
            digests: values that `cairn.engines.models.files.folder_digest` must return for the folders on every machine
                of the engine. A folder without a digest is not checked.
        """
        super().__init__(name, actors, fleet)
        self._folders = {name: folder for name, folder in folders.items() if name in digests}
        self._digests = digests
        self._environment: Environment | None = None

    def start(self, deadline: Deadline, *, adopt: bool = False) -> None:
        """Start the engine; see `EngineHandle.start`. Raises BadModel also where a machine has another model than the
        run's."""
        with self._replacing:
            self._environment = None
            super().start(deadline, adopt=adopt)
            self._require_models(deadline)

    @property
    def environment(self) -> Environment:
        """Environment that all of its actors compute on. Waits for an engine that is being replaced. Raises EngineDied
        and EngineTimeout."""
        environment = self._environment
        if environment is None:
            with self._replacing:
                deadline = Deadline(self._fleet.call_timeout)
                environment = self._environment = combined(list(self._environments(deadline).values()))
        return environment

    def _environments(self, deadline: Deadline) -> dict[Actor, Environment]:
        refs = {actor: actor.call("environment", concurrency_group=CONTROL) for actor in self._actors}
        return {actor: self._result(ref, deadline, actor, "environment") for actor, ref in refs.items()}

    def _require_models(self, deadline: Deadline) -> None:
        if not self._folders:
            return
        machines = {environment.host: actor for actor, environment in self._environments(deadline).items()}
        asked = {
            host: (actor, actor.call("model_digests", self._folders, dict(self._digests)))
            for host, actor in machines.items()
        }
        for host, (actor, ref) in asked.items():
            found = self._result(ref, deadline, actor, "model_digests")
            for name, digest in found.items():
                if digest != self._digests[name]:
                    raise BadModel(
                        f"{self.name} has loaded another model than the run's: the digest of {self._folders[name]} on "
                        f"{host} is {digest}, but the run's {name} has {self._digests[name]}; copy the folder there"
                    )
