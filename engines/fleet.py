"""The fleet: every engine of a run as Ray actors, placed, named, watched and replaced.

    cairn:<name>:rollout:0, 1, …      rollout engines, one actor each
    cairn:<name>:training:0, 1, …     ranks of the training engine

Each role has a placement group. On a cluster that was joined, actors and groups outlive a driver that is killed; the
next driver of the same name takes over those that were made from the same configuration, and replaces the others.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from configs.digest import digest
from configs.schema.run import RunConfig
from engines.actors import RolloutActor, TrainingActor
from engines.calls import Deadline
from engines.cluster import Cluster
from engines.errors import EngineError
from engines.handles import EngineHandle
from engines.placement import Placement, Role
from engines.rollout.handle import RolloutHandle
from engines.training.handle import TrainingHandle
from engines.weights.object_store import send_weights

LEAST_OBJECT_STORE = 512 * 1024**2
"""Bytes of shared memory, taken only as they are used, for batches, results and the weights of small models."""


class Fleet:
    """The engines of a run. Closed by `close`, or as a context manager."""

    def __init__(
        self, config: RunConfig, rollout: list[RolloutHandle], training: TrainingHandle, closing: ExitStack
    ) -> None:
        self.rollout = rollout
        """The rollout engines."""
        self.training = training
        """The training engine."""
        self._config = config
        self._closing = closing

    @classmethod
    def start(cls, config: RunConfig, *, name: str, total_steps: int) -> "Fleet":
        """Start or join the cluster, make all engines at the same time, and wait for them.

        Args:
            name: of no other fleet on the cluster. An earlier fleet of this name is taken over.
            total_steps: optimizer steps of the whole run.

        Raises:
            BadModel: an engine cannot use the model folder.
            ClusterError: no cluster, or no room on it.
            EngineDied, EngineTimeout: an engine did not come up within `fleet.start_timeout` seconds.
        """
        config = _with_absolute_paths(config)
        roles = rollout_role, training_role = _roles(config, total_steps)
        deadline = Deadline(config.fleet.start_timeout)
        with ExitStack() as stack:
            cluster = Cluster.open(
                config.fleet.ray_address,
                num_cpus=math.ceil(sum(role.count * role.bundle["CPU"] for role in roles)),
                object_store_memory=_object_store_memory(config),
                timeout=deadline.remaining,
            )
            stack.callback(cluster.close)
            placement = Placement(name, roles, cluster, deadline)
            stack.callback(lambda: placement.remove(Deadline(config.fleet.call_timeout)))
            rollout = [
                RolloutHandle(f"rollout:{index}", actor, config.model.path, config.rollout, config.fleet)
                for index, actor in enumerate(placement.actors(rollout_role))
            ]
            training = TrainingHandle("training", placement.actors(training_role), config, total_steps)
            engines = [*rollout, training]
            for engine in engines:
                stack.callback(engine.kill)
            _at_the_same_time(engines, lambda engine: engine.start(deadline, adopt=True))
            return cls(config, rollout, training, stack.pop_all())

    def close(self) -> None:
        """Kill all engines, give their resources back, and leave the cluster; one that was started ends."""
        self._closing.close()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def engines(self) -> Sequence[EngineHandle]:
        """All of them."""
        return [*self.rollout, self.training]

    def health(self) -> dict[str, dict[str, Any] | EngineError]:
        """What every engine says of itself, or why it does not, by name; within `fleet.call_timeout` seconds."""

        def ask(engine: EngineHandle) -> dict[str, Any] | EngineError:
            try:
                return engine.health()
            except EngineError as error:
                return error

        found = _at_the_same_time(self.engines, ask)
        return {engine.name: health for engine, health in zip(self.engines, found, strict=True)}

    def ensure_rollout_alive(self) -> None:
        """Restart the rollout engines that died or hang."""
        _at_the_same_time(self.rollout, RolloutHandle.ensure_alive)

    def rollout_versions(self) -> list[int | None]:
        """The weight version that each rollout engine reports."""
        return _at_the_same_time(self.rollout, RolloutHandle.weight_version)

    def sync_weights(self, *, verify: bool = False) -> list[int]:
        """Bring every rollout engine that is elsewhere to the training engine's version; returns what they report.

        Args:
            verify: also compare checksums of all weights.

        Raises:
            EngineError: an engine died, hung or refused, or does not hold what was sent.
        """
        version = self.training.position().weight_version
        behind = [
            engine for engine, found in zip(self.rollout, self.rollout_versions(), strict=True) if found != version
        ]
        if behind:
            send_weights(self.training, behind, version, bucket_bytes=self._config.fleet.update_weight_buffer_size)
        if verify:
            self.verify_weights()
        reported = self.rollout_versions()
        if any(found != version for found in reported):
            raise EngineError(f"rollout engines report weight versions {reported} after a sync to {version}")
        return [version] * len(reported)

    def verify_weights(self) -> None:
        """Compare the checksum of every rollout engine's weights with the training engine's.

        Raises:
            EngineError: one holds other weights.
        """
        expected = self.training.weights_checksum(self._config.rollout.dtype)
        for engine, found in zip(
            self.rollout, _at_the_same_time(self.rollout, RolloutHandle.weights_checksum), strict=True
        ):
            if found != expected:
                raise EngineError(f"{engine.name} holds weights with checksum {found}, {expected} is the trainer's")


def _roles(config: RunConfig, total_steps: int) -> tuple[Role, Role]:
    rollout, training, fleet = config.rollout, config.training, config.fleet
    trained = ["model", "training", "algorithm", "rollout.rollout_temperature"]
    return (
        Role(
            "rollout",
            RolloutActor,
            rollout.num_engines,
            fleet.num_cpus_per_engine,
            rollout.num_gpus_per_engine,
            rollout.num_threads,
            digest(config, ["model.path", "rollout", "fleet.num_cpus_per_engine"])[:16],
            "rollout.num_engines, rollout.num_gpus_per_engine, fleet.num_cpus_per_engine",
        ),
        Role(
            "training",
            TrainingActor,
            training.world_size,
            fleet.num_cpus_per_rank,
            training.num_gpus_per_rank,
            training.num_threads,
            digest(config, [*trained, "fleet.num_cpus_per_rank"])[:16] + f"-{total_steps}",
            "training.world_size, training.num_gpus_per_rank, fleet.num_cpus_per_rank",
        ),
    )


def _object_store_memory(config: RunConfig) -> int:
    """Room for the two buckets of weights that travel at a time, of which a small model fills less."""
    weights = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    return LEAST_OBJECT_STORE + 2 * min(config.fleet.update_weight_buffer_size, 2 * weights)


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Actors have a working folder of their own."""
    model = config.model
    paths = {name: str(Path(path).absolute()) for name, path in model if path is not None}
    return config.model_copy(update={"model": model.model_copy(update=paths)})


def _at_the_same_time(engines: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
    """Do something with each engine in a thread of its own; the first failure is raised once all have ended."""
    with ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(work, engines))
