"""The driver's handles on its engines: typed calls with a deadline each, and the replacement of a failed engine.

Actor calls are made at most once. A failed call may have taken effect or not. The driver never assumes what the engine
holds after it, but queries its weight version or position.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol

import ray

from cairn.configs.schema.operations import FleetConfig
from cairn.engines.fleet.actors import EngineActor
from cairn.engines.fleet.calls import Deadline, result
from cairn.engines.fleet.cluster import require_cluster
from cairn.engines.fleet.fencing import NO_CLAIM, Callee, Method, P, R, Tenure
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

SAVING = "saving"
"""Concurrency group of the writing of a copied training state, during which the trainer continues its work."""

STORING = "storing"
"""Concurrency group of the writing of copied weights, which does not wait for that of a training state."""


END_TIMEOUT = 10.0
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
        with suppress(ClusterLost):  # then it is gone
            require_cluster()
            if not self._ended_by_itself(handle):
                self.require_held()
                ray.kill(handle)

    def callee(self, group: str | None = None, **options: Any) -> Callee:
        """Return the actor with this driver's claim, for this process and others. Raises EngineDied where there is no
        actor.

        Args:
            group: concurrency group of the calls; None for the one of long work.
            options: further options of Ray for the calls.
        """
        require_cluster()
        if self._handle is None:
            raise EngineDied(f"{self.name} was killed and has not been started again")
        return self._called(self._handle, **({} if group is None else {"concurrency_group": group}), **options)

    def require_held(self) -> None:
        """Raise LeaseLost if another driver may have the actor by now."""
        if self._tenure is not None:
            self._tenure.check()

    def _called(self, handle: "ray.actor.ActorHandle", **options: Any) -> Callee:
        return Callee(handle, NO_CLAIM if self._tenure is None else self._tenure.claim, options)

    def _ended_by_itself(self, handle: "ray.actor.ActorHandle") -> bool:
        """Return whether the actor has ended by itself, which it does only for the newest driver."""
        if self._tenure is None:
            return False  # no other driver has it, so it can be killed
        with suppress(Superseded, EngineError):
            try:
                end = self._called(handle, concurrency_group=CONTROL).call(EngineActor.end)
                result(end, Deadline(END_TIMEOUT), f"{self.name}.end()")
            except EngineDied:
                return True
        return False


def log_of(actor: Actor) -> Path:
    """Return the log file of the actor's server."""
    return Path(LOGS, f"{actor.name.replace(':', '-')}.log").absolute()


@dataclass(frozen=True)
class Call(Generic[R]):
    """A call that an actor of an engine has been sent."""

    engine: "EngineHandle"
    actor: Actor
    method: str
    ref: Any
    """Reference that Ray returned for the call."""

    def result(self, deadline: Deadline | None = None) -> R:
        """Return the result, by default within `fleet.call_timeout` seconds. Raises what the method raises, EngineDied
        and EngineTimeout."""
        try:
            return result(self.ref, deadline or self.engine.patience(), f"{self.actor.name}.{self.method}()")
        except EngineTimeout:
            self.engine.suspect = True
            raise


class Reporting(Protocol):
    """An engine that computes with models."""

    def environment(self) -> Environment:
        """Return the software and hardware that this rank or machine computes on."""


class EngineHandle:
    """An engine: one actor, or several that are its ranks and live and die together. Threads may share it."""

    def __init__(self, name: str, actors: Sequence[Actor], fleet: FleetConfig) -> None:
        self.name = name
        """Name within the fleet. The names of the actors also contain the name of the fleet."""
        self.actor = actors[0]
        """The actor that calls go to; of several ranks or machines the first."""
        self._actors = actors
        self._fleet = fleet
        self._replacing = threading.RLock()
        self.restarts = 0
        """Number of times that this driver replaced the engine."""
        self.make_room: Callable[[], None] = lambda: None
        """Callback before a restart. It takes the memory that the engine shares from the engines that have it."""
        self.report: Callable[[str], None] = lambda sentence: None
        """Callback for a sentence on why the engine is replaced."""
        self.suspect = False
        """Whether the engine may be hung, or its ranks may have diverged. Such an engine may respond, but is of no
        use: `ensure_alive` replaces it."""

    def start(self, deadline: Deadline, *, adopt: bool = False) -> None:
        """Make the engine's actors. With `adopt`, keep those of an earlier driver if all of them respond.

        Raises BadModel, EngineDied, EngineTimeout.
        """
        with self._replacing:
            self.suspect = True  # until it is up: an actor whose engine did not start answers too
            if not (adopt and self._adopted()):
                for actor in self._actors:
                    actor.create(deadline)
                self._make_engine(deadline)
            self.suspect = False

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
                self.report(f"Engine {self.name} is restarted: {error}")
                self.restart()
                return self.health()

    def require_alive(self) -> dict[str, Any]:
        """Return the engine's health. Raises EngineDied or EngineTimeout if an actor of the engine is dead, does not
        respond, or did not end a call in time."""
        if self.suspect:
            raise EngineTimeout("a call of it failed, or did not end in time")
        return self.health()

    def health(self) -> dict[str, Any]:
        """Return the engine's health (that of its first rank, if there are several), the `pids` and `slots` of its
        actors, and its `restarts`.

        Works while the engine works too. Raises EngineDied or EngineTimeout if one of its actors does not respond.
        """
        deadline = self.patience()
        reports = [call.result(deadline) for call in self.call_all(CONTROL, EngineActor.health)]
        of_all = {"pids": [health["pid"] for health in reports], "slots": [health.pop("slot") for health in reports]}
        return {**reports[0], **of_all, "restarts": self.restarts}

    def kill(self) -> None:
        """End the engine's actors for good."""
        for actor in self._actors:
            actor.kill()

    def call(self, group: str | None, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Send the first actor a call. It waits for those before it in the same concurrency group; None is the group of
        long work."""
        return Call(self, self.actor, method.__name__, self.actor.callee(group).call(method, *args, **kwargs))

    def call_all(self, group: str | None, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[Call[R]]:
        """Send every actor the same call."""
        return [
            Call(self, actor, method.__name__, actor.callee(group).call(method, *args, **kwargs))
            for actor in self._actors
        ]

    def call_one(self, actor: Actor, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Send one of the actors a call for long work."""
        return Call(self, actor, method.__name__, actor.callee().call(method, *args, **kwargs))

    def ask(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of a call that the first actor handles while it works."""
        return self.call(CONTROL, method, *args, **kwargs).result()

    def patience(self) -> Deadline:
        """Return a deadline of `fleet.call_timeout` seconds."""
        return Deadline(self._fleet.call_timeout)

    def _make_engine(self, deadline: Deadline) -> None:
        raise NotImplementedError

    def _host(self, actor: Actor, deadline: Deadline) -> str:
        """Return the address on which an actor's server listens. On a cluster of this machine no other machine needs to
        reach it."""
        if self._fleet.ray_address is None:
            return "127.0.0.1"
        return self.call_one(actor, EngineActor.host).result(deadline)

    def _adopted(self) -> bool:
        if not all(actor.find() for actor in self._actors):
            return False
        deadline = self.patience()
        try:
            slots: list[Slot] = self.health()["slots"]
            # The actors must be where this driver's placement has them, because it assigns bundles anew.
            return slots == [actor.slot(deadline) for actor in self._actors]
        except EngineError:
            return False
        except Superseded:  # by a driver of a run of the same name that was deleted since, or of this one
            self._actors[0].require_held()
            return False


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
                environment = self._environment = combined(list(self._environments(self.patience()).values()))
        return environment

    def _environments(self, deadline: Deadline) -> dict[Actor, Environment]:
        return {call.actor: call.result(deadline) for call in self.call_all(CONTROL, Reporting.environment)}

    def _require_models(self, deadline: Deadline) -> None:
        if not self._folders:
            return
        machines = {environment.host: actor for actor, environment in self._environments(deadline).items()}
        calls = {
            host: self.call_one(actor, EngineActor.model_digests, self._folders, dict(self._digests))
            for host, actor in machines.items()
        }
        for host, call in calls.items():
            for name, digest in call.result(deadline).items():
                if digest != self._digests[name]:
                    raise BadModel(
                        f"{self.name} has loaded another model than the run's: the digest of {self._folders[name]} on "
                        f"{host} is {digest}, but the run's {name} has {self._digests[name]}; copy the folder there"
                    )
