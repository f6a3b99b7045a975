"""The exchange of weights: publications of the trainer's, and the version that each rollout engine serves.

A publication is a weight version that engines can fetch, with the digest that it must have there. The trainer continues
with other versions meanwhile. The transport determines what engines fetch from, and how long that lasts: see
`cairn.engines.fleet.weights.transports`.

The weights leave the trainer once a version, for all engines that need it: a *pass* updates them together. A pass takes
the engine that is asked for, the engines that are needed beside it and idle, and those whose callers wait for the same
version. Passes follow one another. An engine's version is queried, never assumed. So an engine that died meanwhile is
detected here, restarted and updated. A router sends requests to engines of one version only. Engines leave the router
before their weights change. When they return, engines of other versions are left out until they are served themselves.
"""

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from ray.exceptions import ObjectLostError

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.actors import RolloutActor
from cairn.engines.fleet.handles import UPDATING, EngineHandle
from cairn.engines.fleet.membership import Membership
from cairn.engines.fleet.requirements import comparison_problems
from cairn.engines.fleet.rollout import RolloutHandle, RouterHandle
from cairn.engines.fleet.training import TrainingHandle, absolute_url
from cairn.engines.fleet.turns import Turns
from cairn.engines.fleet.weights.transports import (
    InStore,
    StoredFiles,
    TargetsFailed,
    Transport,
    call_each,
    results,
)
from cairn.engines.fleet.weights.verification import LoadedChecksums, verify_checksum, verify_log_probs
from cairn.engines.rollout.base import LoadChecked, RolloutEngine
from cairn.engines.types.errors import EngineError, PublicationGone, WeightsDiffer, WrongVersion
from cairn.engines.types.types import Publication
from cairn.engines.weights.layout import StoredVersion
from cairn.storage.store.errors import NoSpace


class WeightExchange:
    """The publications of a fleet, and the rollout engines that fetch them. Threads may share it, except for `publish`,
    which needs the trainer to itself."""

    def __init__(
        self,
        config: RunConfig,
        router: RouterHandle | None,
        rollout: Sequence[RolloutHandle],
        membership: Membership,
        training: TrainingHandle,
        turns: Turns,
        transport: Transport,
    ) -> None:
        self._config = config
        self._router = router
        self._rollout = rollout
        self._membership = membership
        self._training = training
        self._turns = turns
        self._transport = transport
        self._loaded = LoadedChecksums()
        self._stored: dict[int, tuple[Publication, Any]] = {}
        """Publications by version, in the order of publication, each with what its transport's `store` returned."""
        self._lock = threading.Lock()
        self._passing = threading.Lock()
        """Held by the thread whose pass runs."""
        self._waiting: dict[RolloutHandle, tuple[int, bool]] = {}
        """Engines whose callers wait for a pass: version, and whether it is an update in flight."""

    def publish(self, version: int, keep: int) -> Publication:
        """Publish the trainer's weights, so that rollout engines can fetch them. Earlier publications stay if they are
        among the last `keep`, the new one included. An existing publication of the same weights stays as it is.

        Where engines fetch the weights from the trainer itself (`fleet.update_weight_transport` is distributed and
        there is no lag, or they share GPUs), a publication lasts as long as the trainer is at its version.

        Raises:
            WrongVersion: the trainer is not at `version`.
            EngineError, NoSpace: the weights could not be published.
        """
        publication = self.measure(version)
        with self._lock:
            earlier, stored = self._stored.pop(version, (None, None))
        if earlier != publication:
            try:
                stored = self._transport.store(version)
            except (EngineError, NoSpace):
                with self._lock:
                    retained = set(self._stored)
                with suppress(EngineError):
                    self._transport.keep(retained)  # a part of a publication is useless and takes room
                raise
        self._add(publication, stored, keep)
        return publication

    def measure(self, version: int) -> Publication:
        """Return the publication that `publish` would make, without storing anything. Raises as `publish` does."""
        self._turns.for_training()
        return Publication(version, self._training.checksum_at(version, self._config.rollout.dtype))

    @property
    def reads_store(self) -> bool:
        """Whether engines read the weights that the run's store has: see `announce`."""
        return isinstance(self._transport, StoredFiles)

    def announce(self, version: int, store_url: str, versions: Sequence[StoredVersion], keep: int) -> None:
        """Publish weights that the run's store has, the last of `versions`. The trainer takes no part. Only where
        `reads_store`."""
        stored = InStore(absolute_url(store_url), tuple(versions))
        self._add(Publication(version, versions[-1].digest), stored, keep)

    def _add(self, publication: Publication, stored: Any, keep: int) -> None:
        with self._lock:
            self._stored[publication.version] = (publication, stored)
            for old in list(self._stored)[:-keep]:
                del self._stored[old]
            retained = set(self._stored)
        self._transport.keep(retained)
        self._loaded.keep(retained)

    def published(self) -> set[int]:
        """Return the weight versions that an engine can be updated to now."""
        with self._lock:
            versions = set(self._stored)
        return {version for version in versions if self._transport.holds(version)}

    def serve(
        self,
        engine: RolloutHandle,
        version: int,
        beside: Collection[RolloutHandle] = (),
        *,
        checked_within: float = 0.0,
    ) -> None:
        """Have a rollout engine serve a published version. A dead engine is restarted; the engine gets all its memory,
        and is behind the router if there is one. An engine that reports the version is left as it is. Several threads
        may do this with several engines at a time; one that waits while its engine is checked reuses the result. No
        engine that generates behind a router may be updated to another version meanwhile.

        The weights that the engine received are compared with the publication's digest, if it reports a checksum of
        them. `fleet.check_weight_update_equal` also compares what it computes with.

        Args:
            beside: engines that are to serve this version next, and no other. Those of them that are idle and behind
                are updated in the same pass; whether they were, their own calls find out.
            checked_within: seconds for which an engine that was found to serve the version is not queried again. For
                callers that notice themselves if it does not.

        Raises:
            PublicationGone: the engine needs the version, and it is not published any more.
            WeightsDiffer: the engine did not receive what was published; it serves nothing.
            EngineError: an engine died, hung or refused.
        """
        called_at = time.monotonic()
        with engine.serving:
            if not engine.suspect and _checked(engine, version, called_at - checked_within):
                return
            engine.last_check = (0.0, None)
            checked_at = time.monotonic()
            if self._membership.ensure_alive(engine)["weight_version"] != version:
                self._pass(engine, version, beside, in_flight=False)
                return
            self._turns.for_rollout([engine])
            self._route([engine], version)
            engine.last_check = (checked_at, version)

    def updates_in_flight(self) -> bool:
        """Return whether the result of `update` can be checked. Engines that report no checksum must generate to be
        compared."""
        return not self._config.fleet.check_weight_update_equal or all(one.reports_checksum for one in self._rollout)

    def update(self, engine: RolloutHandle, version: int) -> float:
        """Update a rollout engine that serves another version to a published one, between two decoding steps. Samples
        in flight are retracted and paused meanwhile, and do not end (`cairn.engines.rollout.base`). Returns the
        duration in seconds. Only for fleets without a router. Engines whose callers wait for the same version meanwhile
        share a pass.

        Raises as `serve` does. The samples in flight then stay paused until they are aborted, or the engine is updated
        to another version.
        """
        with engine.serving:
            engine.last_check = (0.0, None)
            began = time.monotonic()
            self._pass(engine, version, (), in_flight=True)
            engine.extend_deadline()
            return time.monotonic() - began

    def close(self) -> None:
        """Remove all publications."""
        with self._lock:
            self._stored.clear()
        self._transport.close()

    def _pass(self, engine: RolloutHandle, version: int, beside: Collection[RolloutHandle], *, in_flight: bool) -> None:
        """Update an engine that is behind, by a pass of another thread or by one of this thread. Failures of other
        engines are left to their own callers: the pass is repeated without them."""
        wish, asked_at = (version, in_flight), time.monotonic()
        with self._lock:
            self._waiting[engine] = wish
        try:
            with self._passing:
                failed: set[RolloutHandle] = set()
                while not _checked(engine, version, asked_at):
                    with self._lock:
                        waiting = [one for one, other in self._waiting.items() if other == wish]
                    others = [one for one in dict.fromkeys([*waiting, *beside]) if one is not engine]
                    with ExitStack() as stack:
                        targets = [engine]
                        if not in_flight:
                            stack.enter_context(engine.alone())
                        for other in others:
                            if other not in failed and (
                                in_flight or (other.idle(stack) and (other in waiting or _is_behind(other, version)))
                            ):
                                targets.append(other)
                        try:
                            self._update(targets, version, in_flight=in_flight)
                        except TargetsFailed as error:
                            if engine in error.failures:
                                raise error.failures[engine] from error
                            failed |= error.failures.keys()
        finally:
            with self._lock:
                self._waiting.pop(engine, None)

    def _update(self, targets: Sequence[RolloutHandle], version: int, *, in_flight: bool) -> None:
        """Update engines together, idle ones or, in flight, generating ones. Raises TargetsFailed, and the errors of
        the publication and the trainer."""
        publication, stored = self._find(version)
        if not in_flight:
            for target in targets:
                target.leave_router()
            self._turns.for_update(targets)
        for target in targets:
            target.last_check = (0.0, None)
        checked_at = time.monotonic()
        begun = call_each(targets, RolloutEngine.begin_weight_update, version, in_flight=in_flight)
        try:
            with self._sending(version):
                self._transport.send(version, stored, targets)
        finally:
            results(targets, begun)  # if this failed, it explains the other failures
        sent = self._transport.sent_checksum(stored) or publication.digest
        if in_flight:  # before an engine goes on with what it has
            self._verify_checksums(targets, publication, sent)
        served = results(targets, call_each(targets, RolloutActor.end_update))
        if not in_flight:
            self._verify_checksums(targets, publication, sent)
            self._verify_loaded(targets, publication)
            self._verify_log_probs(targets, publication)
        for target, reported in zip(targets, served, strict=True):
            if reported != version:
                sentence = f"{target.name} reports weight version {reported} after an update to {version}"
                raise TargetsFailed({target: EngineError(sentence)})
        if not in_flight:
            self._turns.for_rollout(targets)
            self._route(targets, version)
        for target in targets:
            target.last_check = (checked_at, version)

    def _verify_checksums(self, targets: Sequence[RolloutHandle], publication: Publication, sent: str) -> None:
        """Compare the checksums of what engines received with that of what was sent, for engines that report one: of
        all of them, since each may report the version from then on. Raises as `_dropped_where_wrong` does."""
        calls = [one.call(UPDATING, RolloutEngine.weights_checksum) for one in targets if one.reports_checksum]
        failed = list[EngineError]()
        for call in calls:
            try:
                with self._dropped_where_wrong(call.engine, publication):
                    verify_checksum(call, publication, sent)
            except EngineError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _verify_loaded(self, targets: Sequence[RolloutHandle], publication: Publication) -> None:
        """Compare what engines of one layout made of the weights, where that is asked for. Raises as
        `_dropped_where_wrong` does."""
        if self._config.fleet.check_weight_update_equal:
            calls = [one.call(UPDATING, LoadChecked.loaded_checksum) for one in targets if one.reports_loaded]
            for call in calls:
                checksum = call.result()
                with self._dropped_where_wrong(call.engine, publication):
                    self._loaded.compare(call.engine, publication, checksum)

    def _verify_log_probs(self, targets: Sequence[RolloutHandle], publication: Publication) -> None:
        """Compare log-probs with the trainer's, where that is asked for and possible, for engines that report no
        checksum of what they compute with. Raises as `_dropped_where_wrong` does."""
        compared = [one for one in targets if one.reports_loaded or not one.reports_checksum]
        if compared and self._config.fleet.check_weight_update_equal and not any(comparison_problems(self._config)):
            self._turns.for_rollout(compared)
            for target in compared:
                with self._dropped_where_wrong(target, publication):
                    verify_log_probs(self._training, target, self._config)

    @contextmanager
    def _dropped_where_wrong(self, engine: EngineHandle, publication: Publication) -> Iterator[None]:
        """Where the body raises WeightsDiffer, drop the publication, which is then of no use, and have the engine serve
        nothing."""
        try:
            yield
        except WeightsDiffer:
            self._drop(publication.version)
            engine.call(UPDATING, RolloutEngine.begin_weight_update, publication.version).result()
            raise

    @contextmanager
    def _sending(self, version: int) -> Iterator[None]:
        """Raise PublicationGone where the weights of a publication cannot be sent because it was removed or lost."""
        try:
            yield
        except WrongVersion as error:
            raise self._gone(version) from error
        except Exception as error:
            if any(isinstance(cause, ObjectLostError) for cause in _causes(error)):
                self._drop(version)
                raise self._gone(version) from error
            raise

    def _drop(self, version: int) -> None:
        with self._lock:
            self._stored.pop(version, None)

    def _find(self, version: int) -> tuple[Publication, Any]:
        with self._lock:
            entry = self._stored.get(version)
        if entry is None:
            raise self._gone(version)
        return entry

    def _gone(self, version: int) -> PublicationGone:
        with self._lock:
            others = ", ".join(map(str, sorted(self._stored.keys() - {version}))) or "none"
        return PublicationGone(
            f"weight version {version} is not published any more (published: {others}): bring the trainer to it and "
            "publish it again"
        )

    def _route(self, engines: Sequence[RolloutHandle], version: int) -> None:
        """Route the requests of engines to all engines that serve this version, and theirs to them."""
        if self._router is None:
            return
        self._router.ensure_alive()
        with self._router.changing:
            for engine in engines:
                engine.routed = version
            for other in self._rollout:
                if other.routed not in (None, version):
                    other.routed, other.last_check = None, (0.0, None)
            workers = {one: one.worker for one in self._rollout if one.worker is not None}
            self._router.serve([worker for one, worker in workers.items() if one.routed == version])
            for engine in engines:
                engine.follow((self._router.url, [worker["url"] for worker in workers.values()]))


def _checked(engine: RolloutHandle, version: int, since: float) -> bool:
    """Return whether the engine was found to serve the version after a moment."""
    checked_at, served_version = engine.last_check
    return served_version == version and checked_at > since


def _is_behind(engine: RolloutHandle, version: int) -> bool:
    """Return whether an engine lives and serves another version, or none."""
    try:
        return bool(engine.require_alive()["weight_version"] != version)
    except EngineError:
        return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        yield from (cause for cause in [getattr(error, "cause", None)] if isinstance(cause, BaseException))
        error = error.__cause__
