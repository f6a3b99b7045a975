"""Membership: which rollout engines of a fleet serve. In a fixed fleet all do; in an elastic one, those with a machine.

| event in an elastic fleet | consequence for the engine |
|---|---|
| Ray finds room for its bundles | it is made there and joins |
| its machine is gone, or Ray drains it | it leaves, and joins again where Ray finds room |
| it dies or falls silent, and its machine stays | the same |

If fewer engines serve than required, callers that need them wait, for as long as an engine may take to start.
Membership depends on timing. It decides where samples are generated, and nothing that is replayed.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError

from cairn.configs.schema.operations import FleetConfig
from cairn.engines.fleet.calls import Deadline
from cairn.engines.fleet.cluster import draining, living_nodes, require_cluster
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.types.errors import ClusterLost, EngineDied, EngineError, Superseded
from cairn.storage.store.errors import LeaseLost, StoreError

LOOK_INTERVAL = 1.0
"""Seconds between two checks of the machines."""

RETRY_INTERVAL = 20.0
"""Seconds before an engine that could not be made is tried again."""

Nodes = Callable[[], set[str] | None]
"""Function that returns the ids of the machines of an engine's bundles; None while one of them has no machine."""


class Membership:
    """Membership of a fixed fleet: all of its rollout engines, always."""

    def __init__(self, engines: Sequence[RolloutHandle]) -> None:
        self.changed: Callable[[], None] = lambda: None
        """Callback when engines have joined or left, from any thread."""
        self._engines = engines

    @property
    def members(self) -> list[RolloutHandle]:
        """The engines that serve, in the fleet's order."""
        return list(self._engines)

    def enough(self) -> bool:
        """Return whether enough engines serve. Raises EngineError where they have been too few for longer than an
        engine may take to start."""
        return True

    def serving(self) -> list[RolloutHandle]:
        """Return the engines that serve; wait until they are enough. Raises as `enough` does."""
        while not self.enough():
            time.sleep(LOOK_INTERVAL)
        return self.members

    def ensure_alive(self, engine: RolloutHandle) -> dict[str, Any]:
        """Return the health of a living engine. Raises EngineDied and EngineTimeout where the engine cannot be
        revived."""
        return engine.ensure_alive()

    def leave(self, engine: RolloutHandle, why: str) -> bool:
        """Remove a lost engine from the members, if the others can continue without it. Returns whether its machine is
        known to be gone."""
        return False

    def open(self) -> None:
        """Let engines join and leave from now on."""

    def close(self) -> None:
        """Let no engines join any more."""


class Elastic(Membership):
    """Membership of an elastic fleet. Threads may share it."""

    def __init__(
        self, nodes: Mapping[RolloutHandle, Nodes], at_least: int, config: FleetConfig, report: Callable[[str], None]
    ) -> None:
        """Begin with the engines that have their bundles now; the caller makes these engines.

        Args:
            nodes: for each engine, a function that returns its machines.
            at_least: number of engines that the run needs to continue.
            report: called with a sentence on each engine that joins or leaves, and why.
        """
        super().__init__(list(nodes))
        self._nodes = nodes
        self._at_least = at_least
        self._start_timeout = config.start_timeout
        self._report = report
        self._lock = threading.Lock()
        self._made_on = {engine: machines for engine, where in nodes.items() if (machines := where()) is not None}
        """Machines on which each engine was made last."""
        self._members = set(self._made_on)
        self._short_since: float | None = None
        self._count()
        self._joining: dict[RolloutHandle, threading.Thread] = {}
        self._not_before: dict[RolloutHandle, float] = {}
        self._closing = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="membership", daemon=True)

    @property
    def members(self) -> list[RolloutHandle]:
        """The engines that serve; see `Membership.members`."""
        with self._lock:
            return [engine for engine in self._engines if engine in self._members]

    def enough(self) -> bool:
        """Return whether enough engines serve; see `Membership.enough`."""
        with self._lock:
            count, since = len(self._members), self._short_since
        if count >= self._at_least:
            return True
        if since is not None and time.monotonic() - since > self._start_timeout:
            raise EngineError(
                f"{self._serving_sentence(count)}, fewer than rollout.min_num_engines ({self._at_least}), for "
                f"more than {self._start_timeout:g} s: add machines to the Ray cluster and `cairn resume`"
            )
        return False

    def ensure_alive(self, engine: RolloutHandle) -> dict[str, Any]:
        """Return the engine's health; see `Membership.ensure_alive`. A dead engine leaves, and is made again when it
        joins."""
        try:
            if engine not in self.members:
                raise EngineDied(f"{engine.name} has left")
            return engine.require_alive()
        except EngineError as error:
            self.leave(engine, str(error))
            raise

    def leave(self, engine: RolloutHandle, why: str) -> bool:
        """Remove a lost engine from the members; see `Membership.leave`."""
        with self._lock:
            left = engine in self._members
            self._members.discard(engine)
            sentence = self._serving_sentence(self._count())
            nodes = self._made_on.get(engine, set())
        if left:
            self._report(f"Engine {engine.name} leaves: {why.rstrip('.')}. {sentence}")
            self.changed()
        with suppress(RayError, ClusterLost):  # then nothing is known
            require_cluster()
            return not nodes <= living_nodes() - draining().keys()
        return False

    def open(self) -> None:
        """Start to watch the machines; see `Membership.open`."""
        self._watching.start()

    def close(self) -> None:
        """Let no engines join any more; see `Membership.close`. An engine that is being made is given up."""
        self._closing.set()
        self._watching.join()
        for engine, thread in self._joining.items():
            while thread.is_alive():
                with suppress(LeaseLost, Superseded, StoreError):
                    engine.kill()  # the calls that start it then fail
                thread.join(0.1)

    def _count(self) -> int:
        """Return how many engines serve, and record since when they are too few."""
        count = len(self._members)
        self._short_since = None if count >= self._at_least else self._short_since or time.monotonic()
        return count

    def _serving_sentence(self, count: int) -> str:
        return f"{count} of {len(self._engines)} rollout engines serve"

    def _watch(self) -> None:
        """Watch the machines, in a thread of its own."""
        while not self._closing.wait(LOOK_INTERVAL):
            try:
                require_cluster()
            except ClusterLost:  # with all engines; a further query would make Ray end this process
                return
            with suppress(RayError):  # its head does not answer now
                self._check()

    def _check(self) -> None:
        drained, members = draining().keys(), self.members
        for engine, where in self._nodes.items():
            nodes = where()
            if engine in members:
                if nodes != self._made_on[engine]:
                    self.leave(engine, "its machine is gone")
                elif self._made_on[engine] & drained:
                    self.leave(engine, "Ray drains its machine")
            elif nodes is not None and not nodes & drained and self._may_join(engine):
                thread = threading.Thread(target=self._join, args=(engine, nodes), name="joining", daemon=True)
                self._joining[engine] = thread
                thread.start()

    def _may_join(self, engine: RolloutHandle) -> bool:
        thread = self._joining.get(engine)
        joins = thread is not None and thread.is_alive()
        return not joins and time.monotonic() >= self._not_before.get(engine, 0.0)

    def _join(self, engine: RolloutHandle, nodes: set[str]) -> None:
        """Make an engine where its bundles are, in a thread of its own."""
        try:
            with engine.alone():  # callers from before it left have got their errors
                engine.start(_Until(self._start_timeout, self._closing))
        except Exception as error:
            self._not_before[engine] = time.monotonic() + RETRY_INTERVAL
            if not self._closing.is_set():
                self._report(f"Engine {engine.name} cannot join: {error}")
            return
        with self._lock:
            self._members.add(engine)
            self._made_on[engine] = nodes
            sentence = self._serving_sentence(self._count())
        self._report(f"Engine {engine.name} joins. {sentence}")
        self.changed()


class _Until(Deadline):
    """A deadline that also ends when an event is set."""

    def __init__(self, seconds: float, over: threading.Event) -> None:
        super().__init__(seconds)
        self._over = over

    @property
    def remaining(self) -> float:
        """Seconds left; 0 once the event is set."""
        return 0.0 if self._over.is_set() else super().remaining
