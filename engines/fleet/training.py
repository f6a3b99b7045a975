"""The driver's handle on the training engine, with all of its ranks."""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.actors import EngineActor
from cairn.engines.fleet.calls import Deadline, put, wait
from cairn.engines.fleet.fencing import Method, P, R
from cairn.engines.fleet.handles import CONTROL, SAVING, SENDING, STORING, Actor, Call, ModelHandle
from cairn.engines.rollout.plan import kind_of, served_model
from cairn.engines.training.base import TrainingEngine
from cairn.engines.training.rank import TrainingRank
from cairn.engines.training.weight_source import WeightSource
from cairn.engines.types.batches import BatchSource
from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout, Superseded
from cairn.engines.types.types import Position, TrainBatch
from cairn.engines.weights.layout import Layout
from cairn.storage.store.errors import NoSpace
from cairn.storage.store.store import StoredFile

if TYPE_CHECKING:
    from cairn.engines.weights.buckets import Bucket

RANK = "cairn.engines.training.rank:TrainingRank"
"""Class that an actor makes as its engine, and starts when the other ranks exist too."""

LEAST_RATE = 20e6
"""Bytes a second that a rank writes or reads of a checkpoint at least, beyond `training.timeout`."""

FAILURE_GRACE = 10.0
"""Seconds that the other ranks get to end a call after one of them failed."""


def _on_ranks(
    method: Method[P, R], agree: Callable[[R], object] | None = None, *, end_together: bool = False
) -> "Callable[Concatenate[TrainingHandle, P], R]":
    """Return the handle's method that calls `method` on all ranks and returns the result of rank 0.

    Args:
        agree: the part of the results that must be equal on all ranks.
        end_together: whether the method's last work is collective. Then a rank is hung that does not return within
            `training.distributed_timeout_minutes` after another one.
    """

    @wraps(method)
    def call(self: "TrainingHandle", *args: P.args, **kwargs: P.kwargs) -> R:
        calls = self._send_all(method, *args, **kwargs)
        results = self._gather(calls, Deadline(self._timeout), self.distributed_timeout if end_together else math.inf)
        return self.agreed(results, agree)

    return call


@dataclass(frozen=True)
class _Copy:
    """The state, or the weights alone, that the ranks have copied."""

    version: int
    digest: str | None
    """Digest of the state, or checksum of the weights."""
    restarts: int
    """Restarts of the engine before it."""
    bytes: int
    """Size on the rank with the largest part."""


def _state(position: Position) -> object:
    return position.weight_version, position.state_digest, position.last_input_digest


class TrainingHandle(ModelHandle):
    """The training engine, with all of its ranks. The classes of its methods describe them; all may raise EngineDied
    and EngineTimeout."""

    position = _on_ranks(TrainingEngine.position, _state)
    """Waits for an update that is under way, such as one that a dead driver began. Raises EngineError where ranks
    differ, or a state is neither the old nor the new one: restart the engine then."""
    train = _on_ranks(
        TrainingEngine.train, lambda result: (result.weight_version, result.state_digest), end_together=True
    )
    gradient_digests = _on_ranks(TrainingEngine.gradient_digests, lambda digests: digests, end_together=True)
    score = _on_ranks(TrainingEngine.score, end_together=True)
    write_scores = _on_ranks(TrainingEngine.write_scores, end_together=True)
    weights_checksum = _on_ranks(TrainingEngine.weights_checksum)
    checksum_at = _on_ranks(TrainingRank.checksum_at)
    export_hf = _on_ranks(TrainingRank.export_hf)

    def __init__(
        self,
        name: str,
        actors: Sequence[Actor],
        config: RunConfig,
        total_steps: int,
        model_digests: Mapping[str, str] | None = None,
        load_code: Callable[[], None] | None = None,
    ) -> None:
        """`load_code`: see `Fleet.start`."""
        self._served, name_of_digest = served_model(config)
        folders = config.model.folders | {name_of_digest: self._served}
        super().__init__(name, actors, config.fleet, folders, model_digests or {})
        self._config = config
        self._total_steps = total_steps
        self._load_code = load_code
        self._timeout = config.training.timeout
        self._offloaded_since: int | None = None
        """Number of restarts at which all ranks had released their memory; None where they may have it."""
        self._copy: _Copy | None = None
        self._version: _Copy | None = None

    def offload(self) -> None:
        """Have all ranks release their memory. Asks no rank where they have done so already."""
        restarts = self.restarts
        if self._offloaded_since != restarts:
            self.on_all(TrainingRank.offload)
            self._offloaded_since = restarts

    def onload(self) -> None:
        """Have all ranks take back their memory."""
        self._offloaded_since = None
        self.on_all(TrainingRank.onload)

    def living_position(self) -> Position:
        """Restart the engine if it does not live, and return its position. For a living engine both calls run at the
        same time."""
        restarts, calls = self.restarts, None
        if not self.suspect:  # `ensure_alive` restarts such an engine, and Ray would print an error that nobody reads
            with suppress(EngineDied):  # `ensure_alive` detects that too
                calls = self.call_all(None, TrainingEngine.position)
        self.ensure_alive()
        if calls is None or self.restarts != restarts:
            return self.position()
        return self.agreed(self._gather(calls, Deadline(self._timeout)), _state)

    def save(self, store_url: str, folder: str) -> list[StoredFile]:
        """Write a checkpoint below `folder`; returns its files."""
        self.copy_state()
        try:
            return self.write_copy(store_url, folder)
        finally:
            self.drop_copy()

    def copy_state(self) -> None:
        """Begin to copy the state to the memory of the ranks' machines. The engine may train on when this returns."""
        position = self.position()
        restarts = self.restarts
        sizes = self.on_all(TrainingEngine.copy_state)
        self._copy = _Copy(position.weight_version, position.state_digest, restarts, max(sizes))

    def holds_copy(self, version: int | None, state_digest: str | None) -> bool:
        """Return whether the ranks hold a copy of this state."""
        return self._is(self._copy, version, state_digest)

    def write_copy(self, store_url: str, folder: str) -> list[StoredFile]:
        """Write a checkpoint of the copied state below `folder`, while the engine may train; returns its files.

        Raises the store's errors, EngineError without a copy, EngineDied, and EngineTimeout if the ranks write less
        than `LEAST_RATE`.
        """
        copy = self._copy
        if copy is None:
            raise EngineError(f"{self.name} holds no copy of its state: it has to be copied again")
        url, deadline = absolute_url(store_url), self._deadline_of(copy.bytes)
        try:
            written = self._written(self.call_all(SAVING, TrainingRank.write_copy, url, folder), deadline)
            indexes = [files[-1] for files in written]
            description = self.call(SAVING, TrainingRank.describe_copy, url, folder, indexes).result()
        except EngineError:  # a part of the copy was not made, or is gone with its rank
            self._copy = None
            raise
        return [*(file for files in written for file in files), description]

    def _is(self, copy: _Copy | None, version: int | None, digest: str | None) -> bool:
        return copy is not None and (copy.version, copy.digest, copy.restarts) == (version, digest, self.restarts)

    @staticmethod
    def _written(calls: Iterable[Call[list[StoredFile]]], deadline: Deadline) -> list[list[StoredFile]]:
        """Return the files of each rank. Raises an error once all ranks have ended, so that none still writes."""
        written: list[list[StoredFile]] = []
        failed: list[Exception] = []
        for call in calls:
            try:
                written.append(call.result(deadline))
            except Exception as error:
                failed.append(error)
        if failed:
            raise next((error for error in failed if isinstance(error, EngineDied)), failed[0])
        return written

    def drop_copy(self) -> None:
        """Give the copied state up. The memory stays with the ranks, for the next copy."""
        self._copy = None
        with suppress(EngineError):  # a rank that is gone holds none
            for call in self.call_all(CONTROL, TrainingEngine.drop_copy):
                call.result()

    def load(self, store_url: str, folder: str, size: int = 0) -> None:
        """Replace the state with a checkpoint of `size` bytes. Raises Damaged."""
        calls = self.call_all(None, TrainingRank.load, absolute_url(store_url), folder)
        self._gather(calls, self._deadline_of(size // len(self._actors)))

    def _deadline_of(self, size: int) -> Deadline:
        """Return the deadline of a call in which each rank moves up to `size` bytes."""
        return Deadline(self._timeout + size / LEAST_RATE)

    def copy_version(self, version: int, dtype: Literal["float32", "bfloat16"], digest: str, base: str | None) -> None:
        """Copy the weights of `version` to the memory of the ranks' machines. The engine may go on to train when this
        returns. Raises WrongVersion."""
        restarts, self._version = self.restarts, None
        sizes = self.on_all(TrainingRank.copy_version, version, dtype, digest, base)
        self._version = _Copy(version, digest, restarts, max(sizes))

    def holds_version(self, version: int | None, digest: str | None) -> bool:
        """Return whether the ranks hold a copy of these weights, the last one that was made."""
        return self._is(self._version, version, digest)

    def write_version(self, store_url: str, folder: str) -> list[StoredFile]:
        """Write the copied weights below `folder`, while the engine may train; returns the files. Raises as
        `write_copy` does."""
        copy = self._version
        if copy is None:
            raise EngineError(f"{self.name} holds no copy of its weights: they have to be copied again")
        try:
            calls = self.call_all(STORING, TrainingRank.write_version, absolute_url(store_url), folder)
            written = self._written(calls, self._deadline_of(copy.bytes))
        except (EngineDied, EngineTimeout):
            self._version = None
            raise
        return [file for files in written for file in files]

    def export_weights(self, version: int, bucket_bytes: int) -> "Generator[Bucket]":
        """Yield buckets of weights in the object store, as arguments of calls: Ray passes the value. Each is made while
        the two before it are in use.

        Raises WrongVersion if the engine is not at `version`.
        """
        with self._exporting(version, bucket_bytes):
            rank = self.actor.callee(num_returns=2)
            calls = deque(rank.call(WeightSource.next_bucket) for _ in range(2))
            while True:
                bucket, more = calls.popleft()
                if not Call[bool](self, self.actor, "next_bucket", more).result():
                    return
                yield bucket
                calls.append(rank.call(WeightSource.next_bucket))

    def broadcast_weights(self, version: int, bucket_bytes: int, backend: str) -> Generator[tuple[Layout, Call[None]]]:
        """Yield the layout of each bucket, and the call that broadcasts it to the receivers' group. The next bucket is
        made while one is sent.

        Raises WrongVersion if the engine is not at `version`.
        """
        with self._exporting(version, bucket_bytes, on_device=backend == "nccl"):
            staging = self.call(None, WeightSource.stage_bucket, backend)
            while layout := staging.result():
                sending = self.call(SENDING, WeightSource.broadcast_bucket)
                staging = self.call(None, WeightSource.stage_bucket, backend)
                yield layout, sending

    def broadcast_copies(self, copies: "Sequence[Bucket]", backend: str) -> Generator[tuple[Layout, Call[None]]]:
        """Yield the same for buckets that `export_weights` yielded, whatever version the engine is at, and whatever it
        does now."""
        for copy in copies:
            layout = self.call(SENDING, WeightSource.stage_copy, copy, backend).result()
            yield layout, self.call(SENDING, WeightSource.broadcast_copy)

    def share_weights(self, version: int, bucket_bytes: int) -> Generator[list[tuple[list[str], bytes]]]:
        """Yield buckets in the memory of the ranks' GPUs, each valid until the next: for every rank its names, and a
        handle (cairn.engines.weights.buckets) on its copy. The next bucket is made while one is in use. Raises
        WrongVersion."""
        self.on_all(WeightSource.begin_export_on_device, version, bucket_bytes)
        try:
            sharing = self.call_all(None, WeightSource.share_bucket)
            while None not in (shared := self._gather(sharing, Deadline(self._timeout))):
                sharing = self.call_all(None, WeightSource.share_bucket)
                yield [one for one in shared if one is not None]
        finally:
            self.on_all(WeightSource.end_export)

    @property
    def label(self) -> str:
        """Name for files, unique among the fleets of the cluster."""
        return self.actor.name.replace(":", "-")

    @property
    def distributed_timeout(self) -> float:
        """Seconds that a collective of the engine's ranks may take."""
        return 60.0 * self._config.training.distributed_timeout_minutes

    @property
    def on_gpu(self) -> bool:
        """Whether the engine computes on GPUs."""
        return self._config.training.num_gpus_per_rank > 0

    @contextmanager
    def _exporting(self, version: int, bucket_bytes: int, *, on_device: bool = False) -> Iterator[None]:
        """Have rank 0 hand out the buckets meanwhile, and the other ranks take part in gathering them."""
        self.on_all(WeightSource.begin_export, version, bucket_bytes, on_device=on_device)
        gathering = [self.call_one(actor, WeightSource.end_export) for actor in self._actors[1:]]
        try:
            yield
        finally:
            deadline = self.patience()
            for call in [self.call(None, WeightSource.end_export), *gathering]:
                call.result(deadline)

    def _make_engine(self, deadline: Deadline) -> None:
        config = self._config
        hosts = self._gather(self.call_all(None, EngineActor.host), deadline)
        pairs = zip(self._actors, hosts, strict=True)
        self._gather(
            [self.call_one(actor, EngineActor.make, RANK, host, config.training) for actor, host in pairs], deadline
        )
        store_address = None
        if len(self._actors) > 1:
            store_address = self.call(None, TrainingRank.listen).result(deadline)
        arguments = (config.model, config.algorithm, config.rollout.rollout_temperature)
        served = self._served if kind_of(config.rollout.engine).holds_as_stored else None
        found = store_address, served, self._load_code
        calls = [
            self.call_one(actor, TrainingRank.start, *arguments, self._total_steps, rank, *found)
            for rank, actor in enumerate(self._actors)
        ]
        self._gather(calls, deadline)

    def on_all(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call every rank, and return the results in the order of ranks."""
        return self._gather(self._send_all(method, *args, **kwargs), Deadline(self._timeout))

    def _send_all(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[Call[R]]:
        """Send every rank a call for long work. A batch is stored once for all of them."""
        stored: Any = [put(value) if isinstance(value, TrainBatch | BatchSource) else value for value in args]
        return self.call_all(None, method, *stored, **kwargs)

    def _gather(self, calls: list[Call[R]], deadline: Deadline, spread: float = math.inf) -> list[R]:
        """Return the results of all ranks, or raise what all of them raise. If the ranks end differently, the engine is
        unusable. The others may then wait for the failed rank for ever, so they get only `FAILURE_GRACE` seconds, and
        none after a death. After a result each further one may take `spread` seconds."""
        results: dict[int, R] = {}
        failures: dict[int, Exception] = {}
        ranks = {call.ref: rank for rank, call in enumerate(calls)}
        running = list(ranks)
        while running and not any(isinstance(failure, EngineDied) for failure in failures.values()):
            seconds = min(deadline.remaining, spread) if results else deadline.remaining
            ended, running = wait(running, FAILURE_GRACE if failures else seconds)
            if not ended:
                break
            for ref in ended:
                rank = ranks[ref]
                try:
                    results[rank] = calls[rank].result(deadline)
                except Exception as error:
                    failures[rank] = error
        if len(results) == len(calls):
            return [results[rank] for rank in range(len(calls))]
        for failure in failures.values():
            if isinstance(failure, Superseded):  # the ranks belong to another driver, which decides
                raise failure
        if len(failures) == len(calls) and len({type(failure) for failure in failures.values()}) == 1:
            raise failures[0]
        self.suspect, method = True, calls[0].method
        for failure in failures.values():
            if isinstance(failure, EngineDied | NoSpace):  # the others only waited for that rank
                raise failure
        if failures:
            raised = "; ".join(f"rank {rank} raised {failure!r}" for rank, failure in sorted(failures.items()))
            raise EngineError(
                f"{method}() ended differently on the ranks of {self.name}: {raised}; it must be restarted"
            )
        late = ", ".join(self._actors[ranks[ref]].name for ref in running)
        limit = f"{spread:g} s after the other ranks" if results and deadline.remaining else f"{deadline.seconds:g} s"
        raise EngineTimeout(f"{method}() did not return within {limit} from {late}")

    def agreed(self, values: list[R], agree: Callable[[R], object] | None) -> R:
        """Return the value of rank 0. Raises EngineError where what `agree` returns differs between ranks."""
        if agree is not None and len({agree(value) for value in values}) > 1:
            self.suspect = True
            raise EngineError(f"the ranks of {self.name} hold different states: {values}; it must be restarted")
        return values[0]


def absolute_url(store_url: str) -> str:
    """Return the URL with an absolute path, because actors have a working folder of their own."""
    return store_url if "://" in store_url else str(Path(store_url).absolute())
