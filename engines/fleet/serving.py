"""The weights that each rollout engine serves: one engine at a time is updated to one publication, by itself.

An engine's version is queried, never assumed. So an engine that died meanwhile is detected here, restarted and updated.
A router sends requests to engines of one version only. An engine leaves the router before its weights change. When it
returns, engines of other versions are left out until they are served themselves.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cairn.configs.schema.operations import FleetConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.calls import at_the_same_time
from cairn.engines.fleet.handles import EngineHandle
from cairn.engines.fleet.membership import Membership
from cairn.engines.fleet.roles import LEAST_CPUS, ActorRole
from cairn.engines.fleet.rollout import RolloutHandle, RouterHandle
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.types.errors import EngineError, WeightsDiffer
from cairn.engines.types.types import GenerateRequest, SamplingParams, TrainBatch
from cairn.engines.weights.layout import MemoryTag

if TYPE_CHECKING:
    from cairn.engines.fleet.weights.publications import Publications


# Whether a rollout engine holds the right weights: by checksum, or by its log-probs of a few tokens.


TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}
"""Greatest difference of a token's log-probs that rounding explains. In bfloat16 the change of one update may be
smaller."""

PROMPTS = [[(31 * row + 7 * column) % 97 for column in range(12)] for row in range(4)]
"""Prompts of token ids that every vocabulary has."""
NEW_TOKENS = 12


def verify_checksum(target: RolloutHandle, asked: Any, version: int, digest: str) -> None:
    """Compare the target's checksum, requested with `submit`, with that of the version. Raises WeightsDiffer."""
    found = target.finish(asked, "weights_checksum")
    if found != digest:
        raise WeightsDiffer(
            f"{target.name} holds weights with checksum {found}, and weight version {version} was published with "
            f"{digest}: it must be published again"
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


# Turns of training and rollout with the GPUs that they share.
#
#     rollout releases → training onloads → trains → offloads → rollout resumes its weights' memory → they are updated
#     → rollout resumes its cache
#
# Each engine knows what it released, and a call does nothing if its work is done already. So the next turn completes
# what a crash left half done.


def share_bundles(training: ActorRole, rollout: ActorRole, config: RunConfig) -> tuple[ActorRole, ActorRole]:
    """Return both roles, with the rollout engines as guests: each is in the bundle of the ranks whose GPUs it uses. On
    CPUs, which are not shared, each is a guest of one rank.

    All bundles have room for the same number of guests. Ray places larger bundles first, so with different sizes ranks
    would be in unexpected places.
    """
    stride, ranks = int(config.rollout.num_gpus_per_engine), config.training.world_size
    firsts = [index * stride if stride else index % ranks for index in range(len(rollout.bundles))]
    guests = Counter(training.bundle_of(first)[0] for first in firsts)
    room = max(guests.values()) * max(config.fleet.num_cpus_per_engine, LEAST_CPUS)
    host = replace(training, bundles=tuple(replace(bundle, guest_cpus=room) for bundle in training.bundles))
    return host, replace(rollout, host=host, hosts=tuple(range(first, first + max(1, stride)) for first in firsts))


class Turns:
    """Turns with the shared memory. Without offloading both sides always have their memory, and nothing is done
    here."""

    def __init__(self, rollout: Sequence[RolloutHandle], training: TrainingHandle, fleet: FleetConfig) -> None:
        self._rollout, self._training = rollout, training
        self._offload_rollout, self._offload_train = fleet.offloads_rollout, fleet.offloads_train
        training.make_room = self.release_rollout
        for engine in rollout:
            engine.make_room = self.offload_training

    def release_rollout(self) -> None:
        """Have the rollout engines release their memory. An engine that fails to do so is killed, and the next rollout
        starts it."""
        if self._offload_rollout:
            at_the_same_time(self._rollout, lambda engine: _or_end(engine, engine.release_memory))

    def for_training(self) -> None:
        """Give training the memory. Raises EngineError."""
        self.release_rollout()
        if self._offload_train:
            self._training.onload()

    def for_update(self, engine: RolloutHandle) -> None:
        """Give a rollout engine the memory for weights, which are to be sent. Raises EngineError."""
        self._resume(engine, "weights")

    def for_rollout(self, engine: RolloutHandle) -> None:
        """Give a rollout engine all its memory. Raises EngineError."""
        self._resume(engine, "kv_cache")

    def offload_training(self) -> None:
        """Have training release its memory. If it fails to do so, it is killed, and the next training restores it."""
        if self._offload_train:
            _or_end(self._training, self._training.offload)

    def _resume(self, engine: RolloutHandle, tag: MemoryTag) -> None:
        self.offload_training()
        if self._offload_rollout and tag in engine.health()["released"]:  # else it may generate, and is not disturbed
            engine.resume_memory(tag)


def _or_end(engine: EngineHandle, release: Callable[[], None]) -> None:
    """Release an engine's memory; kill the engine if that fails. A dead or broken engine must not hold memory that
    another one needs."""
    try:
        release()
    except EngineError:
        engine.kill()


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
        """Serve a version; see `cairn.engines.fleet.fleet.Fleet.serve`. A caller that waits while the engine is checked
        reuses the result, if the call came before the check began."""
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
        """Update an engine while it generates; see `cairn.engines.fleet.fleet.Fleet.update`."""
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
        """Start an update of an idle engine and send all weights. The engine executes its calls in order, so that
        nothing here waits between them."""
        begun = engine.submit("begin_weight_update", version)
        try:
            self._publications.send(version, engine)
        finally:
            engine.finish(begun, "begin_weight_update")  # where that failed, it is why the rest did

    def _checksum_of(self, engine: RolloutHandle) -> Any:
        return engine.submit("weights_checksum") if engine.tells_checksum else None

    @contextmanager
    def _dropped_where_wrong(self, version: int) -> Iterator[None]:
        """Drop the publication if an engine with it has other weights than were published: the publication is then of
        no use."""
        try:
            yield
        except WeightsDiffer:
            self._publications.drop(version)
            raise

    def _leave(self, engine: RolloutHandle) -> None:
        with self._routing:
            engine.leave_router()

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


def _serves(engine: RolloutHandle, version: int) -> bool:
    try:
        return engine.weight_version() == version
    except EngineError:
        return False
