"""Turns of training and rollout with the GPUs that they share.

    rollout releases → training onloads → trains → offloads → rollout resumes its weights' memory → they are updated
    → rollout resumes its cache

Each engine knows what it released, and a call does nothing if its work is done already. So the next turn completes what
a crash left half done.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from cairn.configs.schema.operations import FleetConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.calls import map_in_threads
from cairn.engines.fleet.handles import EngineHandle
from cairn.engines.fleet.roles import LEAST_CPUS, ActorRole
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.types.errors import EngineError
from cairn.engines.weights.layout import MemoryTag


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
            map_in_threads(self._rollout, lambda engine: _or_end(engine, engine.release_memory))

    def for_training(self) -> None:
        """Give training the memory. Raises EngineError."""
        self.release_rollout()
        if self._offload_train:
            self._training.onload()

    def for_update(self, engines: Sequence[RolloutHandle]) -> None:
        """Give rollout engines the memory for weights, which are to be sent. Raises EngineError."""
        self._resume(engines, "weights")

    def for_rollout(self, engines: Sequence[RolloutHandle]) -> None:
        """Give rollout engines all their memory. Raises EngineError."""
        self._resume(engines, "kv_cache")

    def offload_training(self) -> None:
        """Have training release its memory. If it fails to do so, it is killed, and the next training restores it."""
        if self._offload_train:
            _or_end(self._training, self._training.offload)

    def _resume(self, engines: Sequence[RolloutHandle], tag: MemoryTag) -> None:
        self.offload_training()
        if self._offload_rollout:
            map_in_threads(engines, lambda engine: _resume_one(engine, tag))


def _resume_one(engine: RolloutHandle, tag: MemoryTag) -> None:
    if tag in engine.health()["released"]:  # otherwise it may be generating
        engine.resume_memory(tag)


def _or_end(engine: EngineHandle, release: Callable[[], None]) -> None:
    """Release an engine's memory; kill the engine if that fails. A dead or broken engine must not hold memory that
    another one needs."""
    try:
        release()
    except EngineError:
        engine.kill()
