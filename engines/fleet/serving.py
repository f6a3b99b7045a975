"""Which weights each rollout engine serves: one engine at a time is brought to one publication, by itself alone.

An engine is asked for its version, never trusted to have the one that it was given: whoever died meanwhile is found
here, restarted and brought up. A router sends requests to engines of one version only: an engine leaves it before its
weights change, and when it comes back, those that are elsewhere are left out until they are served themselves.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cairn.configs.schema.run import RunConfig
from cairn.engines.errors import EngineError, WeightsDiffer
from cairn.engines.fleet.colocation import Turns
from cairn.engines.fleet.membership import Membership
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.fleet.router import RouterHandle
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.weights.verify import verify_checksum, verify_log_probs

if TYPE_CHECKING:
    from cairn.engines.weights.publications import Publications


class Serving:
    """The rollout engines of a fleet, and the publications that they fetch. Threads may share it."""

    def __init__(
        self,
        config: RunConfig,
        router: RouterHandle | None,
        rollout: Sequence[RolloutHandle],
        membership: Membership,
        training: TrainingHandle,
        turns: Turns,
        publications: "Publications",
    ) -> None:
        self._config = config
        self._router = router
        self._rollout = rollout
        self._membership = membership
        self._training = training
        self._turns = turns
        self._publications = publications
        self._routing = threading.Lock()

    def serve(self, engine: RolloutHandle, version: int) -> None:
        """See `cairn.engines.fleet.fleet.Fleet.serve`. Who waits while the engine is looked at takes what that found
        out, if it came before the look began."""
        asked = time.monotonic()
        with engine.serving:
            looked, found = engine.looked
            if found == version and looked > asked:
                return
            engine.looked = (0.0, None)
            looked = time.monotonic()
            if self._membership.ensure_alive(engine)["weight_version"] != version:
                self._bring(engine, version)
            self._turns.for_rollout(engine)
            self._route(engine, version)
            engine.looked = (looked, version)

    def update(self, engine: RolloutHandle, version: int) -> float:
        """See `cairn.engines.fleet.fleet.Fleet.update`."""
        with engine.serving:
            publication = self._publications.get(version)
            engine.looked = (0.0, None)
            began = time.monotonic()
            engine.call("begin_weight_update", version, True)
            self._publications.send(version, engine)
            if (checksum := self._checksum_of(engine)) is not None:
                with self._dropped_where_wrong(version):
                    verify_checksum(engine, checksum, version, publication.digest)
            engine.call("end_weight_update")
            engine.heard()
            return time.monotonic() - began

    def _bring(self, engine: RolloutHandle, version: int) -> None:
        publication = self._publications.get(version)
        self._leave(engine)
        self._turns.for_update(engine)
        try:
            with self._dropped_where_wrong(version):
                with engine.alone():
                    self._send(engine, version)
                    ended, checksum = engine.submit("end_weight_update"), self._checksum_of(engine)
                    served = engine.submit("get_weight_version")
                    engine.finish(ended, "end_weight_update")
                    if checksum is not None:
                        verify_checksum(engine, checksum, version, publication.digest)
                self._turns.for_rollout(engine)
                if checksum is None and self._config.fleet.check_weight_update_equal:
                    verify_log_probs(self._training, engine, self._config)
        except WeightsDiffer:
            engine.call("begin_weight_update", version)  # and so it serves nothing
            raise
        if (found := engine.finish(served, "get_weight_version")) != version:
            raise EngineError(f"{engine.name} reports weight version {found} after an update to {version}")

    def _send(self, engine: RolloutHandle, version: int) -> None:
        """Begin an update of an idle engine and send all weights: it does in order what it is called for, so that
        nobody waits for it in between."""
        begun = engine.submit("begin_weight_update", version)
        try:
            self._publications.send(version, engine)
        finally:
            engine.finish(begun, "begin_weight_update")  # where that failed, it is why the rest did

    def _checksum_of(self, engine: RolloutHandle) -> Any:
        return engine.submit("weights_checksum") if engine.tells_checksum else None

    @contextmanager
    def _dropped_where_wrong(self, version: int) -> Iterator[None]:
        """A publication with which an engine has other weights than were published is of no use."""
        try:
            yield
        except WeightsDiffer:
            self._publications.drop(version)
            raise

    def _leave(self, engine: RolloutHandle) -> None:
        with self._routing:
            engine.leave_router()

    def _route(self, engine: RolloutHandle, version: int) -> None:
        """Let the engine's requests go to all that serve this version, and theirs to it."""
        if self._router is None:
            return
        self._router.ensure_alive()
        with self._routing:
            engine.routed = version
            for other in self._rollout:
                if other is not engine and other.routed is not None and not _serves(other, version):
                    other.routed = None
            workers = {one: one.worker for one in self._rollout if one.worker is not None}
            self._router.serve([worker for one, worker in workers.items() if one.routed == version])
            engine.follow((self._router.url, [worker["url"] for worker in workers.values()]))


def _serves(engine: RolloutHandle, version: int) -> bool:
    try:
        return engine.weight_version() == version
    except EngineError:
        return False
