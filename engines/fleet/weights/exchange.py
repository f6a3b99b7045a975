"""The exchange of weights: publications of the trainer's, and the version that each rollout engine serves.

A publication is a weight version that engines can fetch, with the digest that it must have there. The trainer continues
with other versions meanwhile. The transport determines what engines fetch from, and how long that lasts: see
`cairn.engines.fleet.weights.transports`.

One engine at a time is updated to one publication, by itself. Its version is queried, never assumed. So an engine that
died meanwhile is detected here, restarted and updated. A router sends requests to engines of one version only. An
engine leaves the router before its weights change. When it returns, engines of other versions are left out until they
are served themselves.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from ray.exceptions import ObjectLostError

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.handles import UPDATING, Call
from cairn.engines.fleet.membership import Membership
from cairn.engines.fleet.rollout import RolloutHandle, RouterHandle
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.fleet.turns import Turns
from cairn.engines.fleet.weights.transports import Transport
from cairn.engines.rollout.base import RolloutEngine
from cairn.engines.types.errors import EngineError, PublicationGone, WeightsDiffer, WrongVersion
from cairn.engines.types.types import GenerateRequest, Publication, SamplingParams, TrainBatch
from cairn.storage.store.errors import NoSpace

# Whether a rollout engine holds the right weights: by checksum, or by its log-probs of a few tokens.


TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}
"""Greatest difference of a token's log-probs that rounding explains. In bfloat16 the change of one update may be
smaller."""

PROMPTS = [[(31 * row + 7 * column) % 97 for column in range(12)] for row in range(4)]
"""Prompts of token ids that every vocabulary has."""
NEW_TOKENS = 12


def verify_checksum(call: Call[str], publication: Publication) -> None:
    """Compare the checksum that a call returns with that of the publication. Raises WeightsDiffer."""
    checksum = call.result()
    if checksum != publication.digest:
        raise WeightsDiffer(
            f"{call.engine.name} holds weights with checksum {checksum}, and weight version {publication.version} "
            f"was published with {publication.digest}: it must be published again"
        )


def verify_log_probs(source: TrainingHandle, target: RolloutHandle, config: RunConfig) -> None:
    """Let the target continue fixed prompts and compare its log-probs with the trainer's of the same tokens.

    Weights that no token of the batch uses, such as most rows of an embedding, are not checked.

    Raises:
        WeightsDiffer: the log-probs differ by more than TOLERANCE.
    """
    params = SamplingParams(NEW_TOKENS, config.rollout.rollout_temperature)
    requests = [GenerateRequest((row,), prompt, row, params) for row, prompt in enumerate(PROMPTS)]
    completions = [completion for part in target.generate(requests) for completion in part]
    batch = TrainBatch(
        [np.array([*PROMPTS[done.request_id[0]], *done.response_ids], np.int32) for done in completions],
        [len(done.response_ids) for done in completions],
        [np.ones(len(done.response_ids), np.uint8) for done in completions],
    )
    expected = source.score(batch, "actor")
    worst = max(
        float(np.abs(done.log_probs - scores).max()) for done, scores in zip(completions, expected, strict=True)
    )
    if not worst <= TOLERANCE[config.rollout.dtype]:
        raise WeightsDiffer(
            f"{target.name} holds other weights than the trainer: log-probs of the same tokens differ by {worst:.2g}, "
            f"more than the {TOLERANCE[config.rollout.dtype]:g} that rounding in {config.rollout.dtype} explains"
        )


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
        self._stored: dict[int, tuple[Publication, Any]] = {}
        """Publications by version, in the order of publication, each with what its transport's `store` returned."""
        self._lock = threading.Lock()
        self._routing = threading.Lock()

    def publish(self, version: int, keep: int) -> Publication:
        """Publish the trainer's weights, so that rollout engines can fetch them. Earlier publications stay if they are
        among the last `keep`, the new one included. An existing publication of the same weights stays as it is.

        Where engines fetch the weights from the trainer itself (`fleet.update_weight_transport` is distributed and
        there is no lag, or they share GPUs), a publication lasts as long as the trainer is at its version.

        Raises:
            WrongVersion: the trainer is not at `version`.
            EngineError, NoSpace: the weights could not be published.
        """
        self._turns.for_training()
        publication = Publication(version, self._training.checksum_at(version, self._config.rollout.dtype))
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
        with self._lock:
            self._stored[version] = (publication, stored)
            for old in list(self._stored)[:-keep]:
                del self._stored[old]
            retained = set(self._stored)
        self._transport.keep(retained)
        return publication

    def published(self) -> set[int]:
        """Return the weight versions that an engine can be updated to now."""
        with self._lock:
            versions = set(self._stored)
        return {version for version in versions if self._transport.holds(version)}

    def serve(self, engine: RolloutHandle, version: int) -> None:
        """Have a rollout engine serve a published version. A dead engine is restarted; the engine gets all its memory,
        and is behind the router if there is one. An engine that reports the version is left as it is. Several threads
        may do this with several engines at a time; one that waits while its engine is checked reuses the result. No
        engine that generates behind a router may be updated to another version meanwhile.

        The engine's weights are compared with the publication's digest. Where the engine reports no checksum,
        `fleet.check_weight_update_equal` compares its log-probs with the trainer's.

        Raises:
            PublicationGone: the engine needs the version, and it is not published any more.
            WeightsDiffer: the engine did not receive what was published; it serves nothing.
            EngineError: an engine died, hung or refused.
        """
        called_at = time.monotonic()
        with engine.serving:
            checked_at, served_version = engine.last_check
            if served_version == version and checked_at > called_at:
                return
            engine.last_check = (0.0, None)
            checked_at = time.monotonic()
            if self._membership.ensure_alive(engine)["weight_version"] != version:
                self._update_idle(engine, version)
            self._turns.for_rollout(engine)
            self._route(engine, version)
            engine.last_check = (checked_at, version)

    def updates_in_flight(self) -> bool:
        """Return whether the result of `update` can be checked as configured. Engines that report no checksum must
        generate to be compared."""
        return not self._config.fleet.check_weight_update_equal or all(one.reports_checksum for one in self._rollout)

    def update(self, engine: RolloutHandle, version: int) -> float:
        """Update a rollout engine that serves another version to a published one, between two decoding steps. Samples
        in flight are retracted and paused meanwhile, and do not end (`cairn.engines.rollout.base`). Returns the
        duration in seconds. Only for fleets without a router.

        Raises as `serve` does. The samples in flight then stay paused until they are aborted, or the engine is updated
        to another version.
        """
        with engine.serving:
            publication, stored = self._find(version)
            engine.last_check = (0.0, None)
            began = time.monotonic()
            engine.call(UPDATING, RolloutEngine.begin_weight_update, version, in_flight=True).result()
            with self._sending(version):
                self._transport.send(version, stored, engine)
            if (checksum := _checksum_of(engine)) is not None:
                with self._dropped_where_wrong(version):
                    verify_checksum(checksum, publication)
            engine.call(UPDATING, RolloutEngine.end_weight_update).result()
            engine.extend_deadline()
            return time.monotonic() - began

    def close(self) -> None:
        """Remove all publications."""
        with self._lock:
            self._stored.clear()
        self._transport.close()

    def _update_idle(self, engine: RolloutHandle, version: int) -> None:
        """Update an idle engine. The engine executes its calls in order, so that nothing here waits between them."""
        publication, stored = self._find(version)
        with self._routing:
            engine.leave_router()
        self._turns.for_update(engine)
        try:
            with self._dropped_where_wrong(version):
                with engine.alone():
                    begun = engine.call(UPDATING, RolloutEngine.begin_weight_update, version)
                    try:
                        with self._sending(version):
                            self._transport.send(version, stored, engine)
                    finally:
                        begun.result()  # if this failed, it explains the other failures
                    ended = engine.call(UPDATING, RolloutEngine.end_weight_update)
                    checksum = _checksum_of(engine)
                    served = engine.call(UPDATING, RolloutEngine.get_weight_version)
                    ended.result()
                    if checksum is not None:
                        verify_checksum(checksum, publication)
                self._turns.for_rollout(engine)
                if checksum is None and self._config.fleet.check_weight_update_equal:
                    verify_log_probs(self._training, engine, self._config)
        except WeightsDiffer:
            engine.call(UPDATING, RolloutEngine.begin_weight_update, version).result()  # the engine serves nothing
            raise
        if (reported := served.result()) != version:
            raise EngineError(f"{engine.name} reports weight version {reported} after an update to {version}")

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

    @contextmanager
    def _dropped_where_wrong(self, version: int) -> Iterator[None]:
        """Drop the publication if an engine with it has other weights than were published: the publication is then of
        no use."""
        try:
            yield
        except WeightsDiffer:
            self._drop(version)
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

    def _route(self, engine: RolloutHandle, version: int) -> None:
        """Route the engine's requests to all engines that serve this version, and theirs to it."""
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


def _checksum_of(engine: RolloutHandle) -> Call[str] | None:
    return engine.call(UPDATING, RolloutEngine.weights_checksum) if engine.reports_checksum else None


def _serves(engine: RolloutHandle, version: int) -> bool:
    try:
        return engine.ask(RolloutEngine.get_weight_version) == version
    except EngineError:
        return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        yield from (cause for cause in [getattr(error, "cause", None)] if isinstance(cause, BaseException))
        error = error.__cause__
