"""Transports of weights to rollout engines, all of a pass at once: from a stored copy, or from the trainer itself.

| transport | a publication is | it lasts |
|---|---|---|
| `tensor` | buckets in Ray's object store | until it is dropped, or the machine of the trainer's first rank is lost |
| `disk` | the folder `<update_weight_disk_dir>/<trainer>/weight_v<version>` | until it is removed |
| `store` | files in the run's store; the initial weights are buckets | as the run retains them |
| `distributed` with a lag | the same buckets, which the trainer's first rank broadcasts | as long |
| `tensor` between engines that share GPUs, `distributed` | the trainer itself | as long as the trainer is at it |
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from cairn.configs.schema.operations import FleetConfig
from cairn.engines.fleet.calls import Deadline, map_in_threads, wait
from cairn.engines.fleet.fencing import Method, P, R
from cairn.engines.fleet.handles import CONTROL, SENDING, UPDATING, Call
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.rollout.base import DirectReceiver, RolloutEngine
from cairn.engines.training.weight_source import WeightSource
from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout, Superseded
from cairn.engines.weights.layout import Layout, Meeting, Receiver, StoredVersion

# Weights by broadcast: the trainer's first rank and all processes of all engines of a pass are one process group.
#
# The group persists between passes to the same engines while all members live. A restarted process belongs to no group,
# and a new group is formed. Every wait ends: if anything fails at one end, all leave the group, and what still waits
# for another end fails.

Targets = Sequence[RolloutHandle]
"""Engines that have begun an update."""


class TargetsFailed(EngineError):
    """Some engines did not receive the weights of a pass. The others did not receive all of them either."""

    def __init__(self, failures: Mapping[RolloutHandle, EngineError]) -> None:
        super().__init__("; ".join(f"{engine.name}: {error}" for engine, error in failures.items()))
        self.failures = failures


def _broadcast(
    source: TrainingHandle,
    targets: Targets,
    group: str | None,
    open_buckets: Callable[[str], Generator[tuple[Layout, Call[None]]]],
) -> None:
    """Broadcast buckets to all targets at once. The meeting and each bucket have the deadline of the trainer's own
    collectives. Raises TargetsFailed, EngineError, and what `open_buckets` raises.

    Args:
        group: concurrency group of the trainer's calls.
        open_buckets: returns the buckets for a backend.
    """
    timeout = source.distributed_timeout
    receivers = results(targets, [target.call(UPDATING, DirectReceiver.receiver) for target in targets])
    backend = "nccl" if source.on_gpu and all(receiver.on_gpu for receiver in receivers) else "gloo"
    # After a failure all leave the process group before the buckets are closed. Otherwise the trainer could not end
    # its export.
    with closing(open_buckets(backend)) as buckets, _leaving_on_failure(source, targets, timeout, group):
        size = 1 + sum(receiver.ranks for receiver in receivers)
        known = source.call(group, WeightSource.group).result()
        if known is None or known[1] != size or {receiver.group for receiver in receivers} != {known[0]}:
            _meet(source, targets, receivers, backend, timeout, group)
        for layout, sending in buckets:
            _wait_for([*call_each(targets, DirectReceiver.receive_weights, layout), sending], timeout)


@contextmanager
def _leaving_on_failure(source: TrainingHandle, targets: Targets, timeout: float, group: str | None) -> Iterator[None]:
    """Have all engines leave the group if the body fails. If some of them died, raise their deaths, even if others
    failed first."""
    try:
        yield
    except BaseException as failure:
        _leave(source, targets, timeout, group)
        if isinstance(failure, EngineError):
            with suppress(EngineTimeout):
                source.health()  # raises its death
            if died := _deaths(targets):
                raise TargetsFailed(died) from failure
        raise


def _deaths(targets: Targets) -> dict[RolloutHandle, EngineError]:
    died: dict[RolloutHandle, EngineError] = {}

    def query(target: RolloutHandle) -> None:
        try:
            target.health()
        except EngineDied as error:
            died[target] = error
        except EngineError:
            pass  # its error is a consequence of the failure

    map_in_threads(targets, query)
    return died


def _meet(
    source: TrainingHandle,
    targets: Targets,
    receivers: Sequence[Receiver],
    backend: str,
    timeout: float,
    group: str | None,
) -> None:
    name, rank = f"cairn-{uuid4().hex}", 1
    host, port = source.call(group, WeightSource.open_group, name, timeout).result()
    size = 1 + sum(receiver.ranks for receiver in receivers)
    joining = [source.call(group, WeightSource.join_group, size, backend)]
    for target, receiver in zip(targets, receivers, strict=True):
        meeting = Meeting(name, host, port, backend, size, rank, timeout)
        joining.append(target.call(UPDATING, DirectReceiver.join_group, meeting))
        rank += receiver.ranks
    _wait_for(joining, timeout)


def _leave(source: TrainingHandle, targets: Targets, timeout: float, group: str | None) -> None:
    """Have all engines leave the group, each as soon as its current call has ended. An engine that does not leave is
    detected and replaced later, as any hung engine is."""
    deadline = Deadline(timeout)
    with suppress(EngineError):
        source.call(CONTROL, WeightSource.release_group).result(deadline)
    calls: list[Call[None]] = []
    with suppress(EngineError):
        calls.append(source.call(group, WeightSource.leave_group))
    for target in targets:
        with suppress(EngineError):
            calls.append(target.call(UPDATING, DirectReceiver.leave_group))
    for call in calls:
        with suppress(EngineError):
            call.result(deadline)


def call_each(targets: Targets, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[Call[R]]:
    """Send every target the same call; Ray stores large arguments once."""
    return [target.call(UPDATING, method, *args, **kwargs) for target in targets]


def _wait_for(calls: Sequence[Call[None]], timeout: float) -> None:
    """Wait for all calls. As soon as one of them fails, raise its error: TargetsFailed for the call of a target."""
    deadline = Deadline(timeout)
    left = {call.ref: call for call in calls}
    while left:
        ended, _ = wait(list(left), deadline.remaining)
        for ref in ended or list(left):
            call = left.pop(ref)
            try:
                call.result(deadline)
            except EngineError as error:
                if isinstance(call.engine, RolloutHandle):
                    raise TargetsFailed({call.engine: error}) from error
                raise


def results(targets: Targets, calls: Sequence[Call[R]], deadline: Deadline | None = None) -> list[R]:
    """Return the results of the calls of all targets. Raises TargetsFailed."""
    results: list[R] = []
    failures: dict[RolloutHandle, EngineError] = {}
    for target, call in zip(targets, calls, strict=True):
        try:
            results.append(call.result(deadline))
        except EngineError as error:
            failures[target] = error
    if failures:
        raise TargetsFailed(failures) from next(iter(failures.values()))
    return results


class Transport:
    """A way to store weights for engines and to send them. By default nothing is stored that has to be removed."""

    def store(self, version: int) -> Any:
        """Store the trainer's weights; return what `send` needs. Raises WrongVersion if the trainer is at another
        version."""

    def send(self, version: int, stored: Any, targets: Targets) -> None:
        """Send all weights of a version, once, to all targets. Raises TargetsFailed where targets failed, and
        EngineError where the trainer did."""
        raise NotImplementedError

    def sent_checksum(self, stored: Any) -> str | None:
        """Return the checksum of what `send` sent. None where it is the publication's."""
        return None

    def holds(self, version: int) -> bool:
        """Return whether a version that was stored, and not removed, can be fetched now."""
        return True

    def keep(self, versions: Collection[int]) -> None:
        """Remove all that is stored of other versions."""

    def close(self) -> None:
        """Remove everything. Nothing is stored afterwards."""


def transport_of(
    fleet: FleetConfig, source: TrainingHandle, *, load_timeout: float, maps_gpu_memory: bool, lag: int = 0
) -> Transport:
    """Return the transport that `fleet.update_weight_transport` names.

    Args:
        load_timeout: seconds that an engine may take to load a model folder.
        maps_gpu_memory: whether the engines map the memory of the trainer's GPUs.
        lag: lag of the run. With a lag, engines fetch weights that the trainer does not hold any more.
    """
    match fleet.update_weight_transport:
        case "disk":
            return Folders(source, fleet, load_timeout)
        case "store":
            return StoredFiles(source, fleet.update_weight_buffer_size, load_timeout)
        case "distributed" if lag:
            return CopiedBroadcasts(source, fleet.update_weight_buffer_size)
        case "distributed":
            return Broadcasts(source, fleet.update_weight_buffer_size)
        case "tensor" if maps_gpu_memory:
            return Handles(source, fleet.update_weight_buffer_size)
        case "tensor":
            return Buckets(source, fleet.update_weight_buffer_size)


class Buckets(Transport):
    """Transport in Ray's object store, from which every engine reads. Ray frees buckets without a reference."""

    def __init__(self, source: TrainingHandle, bucket_bytes: int) -> None:
        self._source, self._bucket_bytes = source, bucket_bytes

    def store(self, version: int) -> Any:
        with closing(self._source.export_weights(version, self._bucket_bytes)) as buckets:
            stored = list(buckets)
        return stored, self._source.ask(WeightSource.sent_checksum)

    def sent_checksum(self, stored: Any) -> str | None:
        _, checksum = stored
        return checksum

    def send(self, version: int, stored: Any, targets: Targets) -> None:
        """Send all buckets. The next bucket travels to the engines' machines while the last one is loaded."""
        calls: list[Call[None]] = []
        for bucket in stored[0]:
            earlier, calls = calls, call_each(targets, RolloutEngine.update_weights, bucket)
            results(targets[: len(earlier)], earlier)
        results(targets[: len(calls)], calls)


@dataclass(frozen=True)
class InStore:
    """A version in the run's store: whole weights, and the differences after them."""

    url: str
    versions: tuple[StoredVersion, ...]


class StoredFiles(Buckets):
    """Transport in the run's store, which the trainer has written to. Weights that are not there are sent as
    buckets."""

    def __init__(self, source: TrainingHandle, bucket_bytes: int, load_timeout: float) -> None:
        super().__init__(source, bucket_bytes)
        self._load_timeout = load_timeout

    def sent_checksum(self, stored: Any) -> str | None:
        return None if isinstance(stored, InStore) else super().sent_checksum(stored)

    def send(self, version: int, stored: Any, targets: Targets) -> None:
        if not isinstance(stored, InStore):
            super().send(version, stored, targets)
            return
        calls = call_each(targets, RolloutEngine.update_weights_from_store, stored.url, stored.versions)
        results(targets, calls, Deadline(self._load_timeout))


class CopiedBroadcasts(Buckets):
    """Transport in Ray's object store, and from there in a process group of the trainer's first rank and the engines,
    while the trainer continues its work."""

    def send(self, version: int, stored: Any, targets: Targets) -> None:
        self._source.ensure_alive()  # a publication outlives the trainer's process, which sends it
        _broadcast(self._source, targets, SENDING, partial(self._source.broadcast_copies, stored[0]))


class Folders(Transport):
    """Transport as model folders, on a disk that the machines of the fleet share."""

    def __init__(self, source: TrainingHandle, fleet: FleetConfig, load_timeout: float) -> None:
        assert fleet.update_weight_disk_dir is not None
        self._source = source
        self._parent = Path(fleet.update_weight_disk_dir, source.label).absolute()
        self._keep_files = fleet.update_weight_disk_keep_files
        self._load_timeout = load_timeout

    def store(self, version: int) -> Path:
        folder = self._parent / _folder_name(version)
        self._source.export_hf(version, folder)
        return folder

    def send(self, version: int, stored: Any, targets: Targets) -> None:
        calls = call_each(targets, RolloutEngine.update_weights_from_disk, stored)
        results(targets, calls, Deadline(self._load_timeout))

    def keep(self, versions: Collection[int]) -> None:
        """Remove all other folders, those of killed drivers included."""
        if not self._keep_files:
            names = [_folder_name(version) for version in versions]
            self._source.ask(WeightSource.keep_folders, self._parent, names)

    def close(self) -> None:
        with suppress(EngineError, Superseded):
            self.keep(())


class _FromTrainer(Transport):
    """Transport in which the trainer sends its own weights."""

    def __init__(self, source: TrainingHandle) -> None:
        self._source = source

    def sent_checksum(self, stored: Any) -> str | None:
        return self._source.ask(WeightSource.sent_checksum)

    def holds(self, version: int) -> bool:
        try:
            return self._source.position().weight_version == version
        except EngineError:
            return False


class Broadcasts(_FromTrainer):
    """Transport in one process group of the trainer's first rank and all engines."""

    def __init__(self, source: TrainingHandle, bucket_bytes: int) -> None:
        super().__init__(source)
        self._bucket_bytes = bucket_bytes

    def send(self, version: int, stored: Any, targets: Targets) -> None:
        buckets = partial(self._source.broadcast_weights, version, self._bucket_bytes)
        _broadcast(self._source, targets, None, buckets)


class Handles(_FromTrainer):
    """Transport in the memory of GPUs that training and rollout share: each tensor-parallel rank of a server maps the
    copy of the training rank on its GPU. One export serves the engines of all ranks."""

    def __init__(self, source: TrainingHandle, bucket_bytes: int) -> None:
        super().__init__(source)
        self._bucket_bytes = bucket_bytes

    def send(self, version: int, stored: Any, targets: Targets) -> None:
        with closing(self._source.share_weights(version, self._bucket_bytes)) as buckets:
            for shared in buckets:
                calls = []
                for target in targets:
                    handles = [shared[rank][1] for rank in target.ranks]
                    calls.append(target.call(UPDATING, DirectReceiver.map_weights, shared[0][0], handles))
                results(targets, calls)


def _folder_name(version: int) -> str:
    return f"weight_v{version:06d}"
