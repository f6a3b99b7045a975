"""The driver's handle on the training engine, with all of its ranks."""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.calls import Deadline, put, wait
from cairn.engines.fleet.handles import SENDING, Actor, ModelHandle
from cairn.engines.rollout.plan import kind_of
from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout, Superseded
from cairn.engines.types.types import ModelRole, Position, TrainBatch, TrainResult
from cairn.engines.weights.layout import Layout
from cairn.storage.store.errors import NoSpace
from cairn.storage.store.store import StoredFile

RANK = "cairn.engines.training.rank:TrainingRank"
"""Class that an actor makes as its engine, and starts when the other ranks exist too."""

FAILURE_GRACE = 10.0
"""Seconds that the other ranks get to end a call after one of them failed."""


class TrainingHandle(ModelHandle):
    """The training engine, with all of its ranks. `cairn.engines.training.base` describes its calls; all may raise
    EngineDied and EngineTimeout."""

    def __init__(
        self,
        name: str,
        actors: Sequence[Actor],
        config: RunConfig,
        total_steps: int,
        model_digests: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, actors, config.fleet, config.model.folders, model_digests or {})
        self._config = config
        self._total_steps = total_steps
        self._timeout = config.training.timeout

    def position(self) -> Position:
        """Return the engine's position. Waits for an update that is under way, such as one that a dead driver began.

        Raises EngineError where ranks differ, or a state is neither the old nor the new one: restart the engine then.
        """
        return self._agreed_position(self._on_all("position"))

    def living_position(self) -> Position:
        """Restart the engine if it does not live, and return its position. For a living engine both calls run at the
        same time."""
        restarts, asked = self.restarts, None
        with contextlib.suppress(EngineDied):  # which `ensure_alive` finds out too
            asked = self._ask_all("position")
        self.ensure_alive()
        if asked is None or self.restarts != restarts:
            return self.position()
        return self._agreed_position(self._gather(asked, Deadline(self._timeout), "position"))

    def train(
        self,
        batch: TrainBatch,
        *,
        num_steps: int,
        expected_version: int,
        input_digest: str,
        train_actor: bool = True,
        update_reference: bool = False,
    ) -> TrainResult:
        """Take `num_steps` optimizer steps. Raises WrongVersion, and the engine's other errors."""
        args = (put(batch), num_steps, expected_version, input_digest, train_actor, update_reference)
        return self._agreed(self._on_all("train", *args), lambda r: (r.weight_version, r.state_digest))

    def score(self, batch: TrainBatch, role: ModelRole) -> list[np.ndarray]:
        """Return [R_i] float32 for each sample: log-probs of its response tokens, or the critic's values; see
        `cairn.engines.training.base.TrainingEngine.score`."""
        return self._on_all("score", put(batch), role)[0]

    def save(self, store_url: str, folder: str) -> list[StoredFile]:
        """Write a checkpoint below `folder`; returns its files."""
        return self._on_all("save", _absolute(store_url), folder)[0]

    def load(self, store_url: str, folder: str) -> None:
        """Replace the state with a checkpoint. Raises Damaged."""
        self._on_all("load", _absolute(store_url), folder)

    def checksum_at(self, version: int, dtype: Literal["float32", "bfloat16"]) -> str:
        """Return `weights_checksum` at a version. Raises WrongVersion if the engine is not at that version."""
        return self._on_all("checksum_at", version, dtype)[0]

    def weights_checksum(self, dtype: Literal["float32", "bfloat16"] = "float32") -> str:
        """Return the checksum that the exported weights have in an engine that holds them in `dtype`."""
        return self._on_all("weights_checksum", dtype)[0]

    def export_weights(self, version: int, bucket_bytes: int) -> "Generator[ray.ObjectRef[Any]]":
        """Yield buckets of weights (cairn.engines.weights.buckets) in the object store. Each is made while the two
        before it are in use.

        Raises WrongVersion if the engine is not at `version`.
        """
        with self._exporting(version, bucket_bytes) as first:
            asked = deque(first.call("next_bucket", num_returns=2) for _ in range(2))
            while True:
                bucket, more = asked.popleft()
                if not self._result(more, Deadline(self._fleet.call_timeout), first, "next_bucket"):
                    return
                yield bucket
                asked.append(first.call("next_bucket", num_returns=2))

    def broadcast_weights(
        self, version: int, bucket_bytes: int, backend: str, target: str
    ) -> "Generator[tuple[Layout, ray.ObjectRef[Any]]]":
        """Yield the layout of each bucket, and the call that broadcasts it in the group of the trainer and the target.

        Raises WrongVersion if the engine is not at `version`.
        """
        with self._exporting(version, bucket_bytes) as first:
            while layout := self.finish(first.call("stage_bucket", backend), "stage_bucket"):
                yield layout, first.call("broadcast_bucket", target)

    def broadcast_copies(
        self, copies: "Sequence[ray.ObjectRef[Any]]", backend: str, target: str
    ) -> "Generator[tuple[Layout, ray.ObjectRef[Any]]]":
        """Yield the same for buckets that `export_weights` yielded, whatever version the engine is at, and whatever it
        does now."""
        first = self._actors[0]
        for copy in copies:
            staging = first.call("stage_copy", copy, backend, concurrency_group=SENDING)
            layout = self.finish(staging, "stage_copy")
            yield layout, first.call("broadcast_copy", target, concurrency_group=SENDING)

    def share_weights(self, version: int, bucket_bytes: int) -> Generator[list[tuple[list[str], bytes]]]:
        """Yield buckets in the memory of the ranks' GPUs, each valid until the next: for every rank its names, and a
        handle (cairn.engines.weights.buckets) on its copy. Raises WrongVersion."""
        self._on_all("begin_export_on_device", version, bucket_bytes)
        try:
            while all(shared := self._on_all("share_bucket")):
                yield shared
        finally:
            self._on_all("end_export")

    def export_hf(self, version: int, folder: Path) -> None:
        """Write a model folder, within `training.timeout` seconds. Raises WrongVersion."""
        self._on_all("export_hf", version, folder)

    def offload(self) -> None:
        """Release the GPUs' memory, which takes up to `training.timeout` seconds. Does nothing if that is done
        already."""
        self._on_all("offload")

    def onload(self) -> None:
        """Take the memory back."""
        self._on_all("onload")

    def submit(self, method: str, *args: Any, **options: Any) -> "ray.ObjectRef[Any]":
        """Start a call of rank 0 that waits for those before it."""
        return self._actors[0].call(method, *args, **options)

    def finish(self, ref: "ray.ObjectRef[Any]", method: str, deadline: Deadline | None = None) -> Any:
        """Return the result of a started call of rank 0, within `fleet.call_timeout` seconds by default."""
        return self._result(ref, deadline or Deadline(self._fleet.call_timeout), self._actors[0], method)

    @property
    def label(self) -> str:
        """Name for files, unique among the fleets of the cluster."""
        return self._actors[0].name.replace(":", "-")

    @property
    def on_gpu(self) -> bool:
        """Whether the engine computes on GPUs."""
        return self._config.training.num_gpus_per_rank > 0

    @contextmanager
    def _exporting(self, version: int, bucket_bytes: int) -> Iterator[Actor]:
        """Yield the actor of rank 0, which hands out the buckets, while the other ranks take part in gathering them."""
        self._on_all("begin_export", version, bucket_bytes)
        first, *others = self._actors
        gathering = [(actor, actor.call("end_export")) for actor in others]
        try:
            yield first
        finally:
            deadline = Deadline(self._fleet.call_timeout)
            for actor, ref in [(first, first.call("end_export")), *gathering]:
                self._result(ref, deadline, actor, "end_export")

    def _make_engine(self, deadline: Deadline) -> None:
        first, config = self._actors[0], self._config
        hosts = self._gather([actor.call("host") for actor in self._actors], deadline, "host")
        ranks = [actor.call("make", RANK, host) for actor, host in zip(self._actors, hosts, strict=True)]
        self._gather(ranks, deadline, "make")
        store_address = None
        if len(self._actors) > 1:
            store_address = self._result(first.call("listen"), deadline, first, "listen")
        arguments = (config.model, config.training, config.algorithm, config.rollout.rollout_temperature)
        as_stored = kind_of(config.rollout.engine).holds_as_stored
        calls = [
            actor.call("start", *arguments, self._total_steps, rank, store_address, as_stored)
            for rank, actor in enumerate(self._actors)
        ]
        self._gather(calls, deadline, "start")

    def _on_all(self, method: str, *args: Any) -> list[Any]:
        """Call every rank, and return the results in the order of ranks."""
        return self._gather(self._ask_all(method, *args), Deadline(self._timeout), method)

    def _ask_all(self, method: str, *args: Any) -> "list[ray.ObjectRef[Any]]":
        return [actor.call(method, *args) for actor in self._actors]

    def _gather(self, calls: "list[ray.ObjectRef[Any]]", deadline: Deadline, method: str) -> list[Any]:
        """Return the results of all ranks, or raise what all of them raise. If the ranks end differently, the engine is
        unusable. The others may then wait for the failed rank for ever, so they get only `FAILURE_GRACE` seconds, and
        none after a death."""
        results: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        running = list(calls)
        while running and not any(isinstance(failure, EngineDied) for failure in failures.values()):
            ended, running = wait(running, FAILURE_GRACE if failures else deadline.remaining)
            if not ended:
                break
            for ref in ended:
                rank = calls.index(ref)
                try:
                    results[rank] = self._result(ref, deadline, self._actors[rank], method)
                except Exception as error:
                    failures[rank] = error
        if len(results) == len(calls):
            return [results[rank] for rank in range(len(calls))]
        for failure in failures.values():
            if isinstance(failure, Superseded):  # the ranks belong to another driver: what they are is its affair
                raise failure
        if len(failures) == len(calls) and len({type(failure) for failure in failures.values()}) == 1:
            raise failures[0]
        self._suspect = True
        for failure in failures.values():
            if isinstance(failure, EngineDied | NoSpace):  # the others merely waited for that one
                raise failure
        if failures:
            raised = "; ".join(f"rank {rank} raised {failure!r}" for rank, failure in sorted(failures.items()))
            raise EngineError(
                f"{method}() ended differently on the ranks of {self.name}: {raised}; it must be restarted"
            )
        late = ", ".join(self._actors[calls.index(ref)].name for ref in running)
        raise EngineTimeout(f"{method}() did not return within {deadline.seconds:g} s from {late}")

    def _agreed_position(self, positions: list[Position]) -> Position:
        found: Position = self._agreed(positions, lambda p: (p.weight_version, p.state_digest, p.last_input_digest))
        return found

    def _agreed(self, values: list[Any], key: Callable[[Any], object]) -> Any:
        """Return the value of rank 0 if all ranks have the same. Raises EngineError otherwise."""
        if len({key(value) for value in values}) > 1:
            self._suspect = True
            raise EngineError(f"the ranks of {self.name} hold different states: {values}; it must be restarted")
        return values[0]


def _absolute(store_url: str) -> str:
    """Return the URL with an absolute path, because actors have a working folder of their own."""
    return store_url if "://" in store_url else str(Path(store_url).absolute())
