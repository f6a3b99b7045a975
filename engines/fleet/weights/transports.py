"""Transports of weights to a rollout engine: from a stored copy, or from the trainer while it is at that version.

| transport | a publication is | it lasts |
|---|---|---|
| `tensor` | buckets in Ray's object store | until it is dropped, or the machine of the trainer's first rank is lost |
| `disk` | the folder `<update_weight_disk_dir>/<trainer>/weight_v<version>` | until it is removed |
| `distributed` with a lag | the same buckets, which the trainer's first rank broadcasts | as long |
| `tensor` between engines that share GPUs, `distributed` | the trainer itself | as long as the trainer is at it |
"""

import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray

from cairn.configs.schema.operations import FleetConfig
from cairn.engines.fleet.calls import Deadline
from cairn.engines.fleet.handles import CONTROL, SENDING, UPDATING, Call
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.rollout.base import DirectReceiver, RolloutEngine
from cairn.engines.training.weight_source import WeightSource
from cairn.engines.types.errors import EngineDied, EngineError, Superseded
from cairn.engines.weights.layout import Layout, Meeting, Receiver

# Weights by broadcast: the trainer's first rank and all processes of one engine are a process group.
#
# The group persists between updates while both live. A restarted process belongs to no group, and a new group is
# formed. Every wait ends: if anything fails at one end, both leave the group, and what still waits for the other end
# fails.


def _broadcast(
    source: TrainingHandle,
    target: RolloutHandle,
    timeout: float,
    group: str | None,
    open_buckets: Callable[[str, str], Generator[tuple[Layout, Call[None]]]],
) -> None:
    """Broadcast buckets to a target that has begun an update, each within `timeout` seconds. Raises EngineError, and
    what `open_buckets` raises.

    Args:
        group: concurrency group of the trainer's calls.
        open_buckets: returns the buckets for a backend and the target's name.
    """
    receiver = target.call(UPDATING, DirectReceiver.receiver).result()
    backend = "nccl" if source.on_gpu and receiver.on_gpu else "gloo"
    # After a failure both leave the process group before the buckets are closed. Otherwise the trainer could not end
    # its export.
    with closing(open_buckets(backend, target.name)) as buckets, _leaving_on_failure(source, target, timeout, group):
        whole = (receiver.group, 1 + receiver.ranks)
        if source.call(group, WeightSource.group, target.name).result() != whole:
            _meet(source, target, receiver, backend, timeout, group)
        for layout, sending in buckets:
            _both([target.call(UPDATING, DirectReceiver.receive_weights, layout), sending], timeout)


@contextmanager
def _leaving_on_failure(
    source: TrainingHandle, target: RolloutHandle, timeout: float, group: str | None
) -> Iterator[None]:
    """Have both engines leave the group if the body fails. If one of them died, raise its death, even if the other one
    failed first."""
    try:
        yield
    except BaseException as failure:
        _leave(source, target, timeout, group)
        if isinstance(failure, EngineError) and not isinstance(failure, EngineDied):
            for engine in (source, target):
                try:
                    engine.health()
                except EngineDied as died:
                    raise died from failure
                except EngineError:
                    continue  # its error is a consequence of the failure
        raise


def _meet(
    source: TrainingHandle, target: RolloutHandle, receiver: Receiver, backend: str, timeout: float, group: str | None
) -> None:
    name = f"cairn-{uuid4().hex}"
    host, port = source.call(group, WeightSource.open_group, target.name, name, timeout).result()
    size = 1 + receiver.ranks
    joining = source.call(group, WeightSource.join_group, target.name, size, backend)
    meeting = Meeting(name, host, port, backend, size, rank=1)
    _both([joining, target.call(UPDATING, DirectReceiver.join_group, meeting)], timeout)


def _leave(source: TrainingHandle, target: RolloutHandle, timeout: float, group: str | None) -> None:
    """Have both engines leave the group, each as soon as its current call has ended. An engine that does not leave is
    detected and replaced later, as any hung engine is."""
    deadline = Deadline(timeout)
    with suppress(EngineError):
        source.call(CONTROL, WeightSource.release_group, target.name).result(deadline)
    calls: list[Call[None]] = []
    with suppress(EngineError):
        calls.append(source.call(group, WeightSource.leave_group, target.name))
    with suppress(EngineError):
        calls.append(target.call(UPDATING, DirectReceiver.leave_group))
    for call in calls:
        with suppress(EngineError):
            call.result(deadline)


def _both(calls: Sequence[Call[None]], timeout: float) -> None:
    """Wait for both calls. As soon as one of them fails, raise its error."""
    deadline = Deadline(timeout)
    left = list(calls)
    while left:
        ended, _ = ray.wait([call.ref for call in left], timeout=deadline.remaining)
        for call in list(left):
            if call.ref in ended or not ended:
                call.result(deadline)
                left.remove(call)


class Transport:
    """A way to store weights for engines and to send them. By default nothing is stored that has to be removed."""

    def store(self, version: int) -> Any:
        """Store the trainer's weights; return what `send` needs. Raises WrongVersion if the trainer is at another
        version."""

    def send(self, version: int, stored: Any, target: RolloutHandle) -> None:
        """Send all weights of a version to a target that has begun an update. Raises EngineError."""
        raise NotImplementedError

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
        case "distributed" if lag:
            return CopiedBroadcasts(source, fleet.update_weight_buffer_size, fleet.call_timeout)
        case "distributed":
            return Broadcasts(source, fleet.update_weight_buffer_size, fleet.call_timeout)
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
            return list(buckets)

    def send(self, version: int, stored: Any, target: RolloutHandle) -> None:
        """Send all buckets. The next bucket travels to the engine's machine while the last one is loaded."""
        calls: list[Call[None]] = []
        for bucket in stored:
            calls.append(target.call(UPDATING, RolloutEngine.update_weights, bucket))
            if len(calls) > 1:
                calls.pop(0).result()
        for call in calls:
            call.result()


class CopiedBroadcasts(Buckets):
    """Transport in Ray's object store, and from there in a process group of the trainer's first rank and the engine,
    while the trainer continues its work."""

    def __init__(self, source: TrainingHandle, bucket_bytes: int, timeout: float) -> None:
        super().__init__(source, bucket_bytes)
        self._timeout = timeout
        self._sending = threading.Lock()

    def send(self, version: int, stored: Any, target: RolloutHandle) -> None:
        with self._sending:
            self._source.ensure_alive()  # a publication outlives the trainer's process, which sends it
            buckets = partial(self._source.broadcast_copies, stored)
            _broadcast(self._source, target, self._timeout, SENDING, buckets)


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

    def send(self, version: int, stored: Any, target: RolloutHandle) -> None:
        call = target.call(UPDATING, RolloutEngine.update_weights_from_disk, stored)
        call.result(Deadline(self._load_timeout))

    def keep(self, versions: Collection[int]) -> None:
        """Remove all other folders, those of killed drivers included."""
        if not self._keep_files:
            names = [_folder_name(version) for version in versions]
            self._source.ask(WeightSource.keep_folders, self._parent, names)

    def close(self) -> None:
        with suppress(EngineError, Superseded):
            self.keep(())


class _FromTrainer(Transport):
    """Transport in which the trainer sends its own weights, to one engine at a time."""

    def __init__(self, source: TrainingHandle) -> None:
        self._source = source
        self._sending = threading.Lock()

    def holds(self, version: int) -> bool:
        try:
            return self._source.position().weight_version == version
        except EngineError:
            return False


class Broadcasts(_FromTrainer):
    """Transport in a process group of the trainer and the engine."""

    def __init__(self, source: TrainingHandle, bucket_bytes: int, timeout: float) -> None:
        super().__init__(source)
        self._bucket_bytes, self._timeout = bucket_bytes, timeout

    def send(self, version: int, stored: Any, target: RolloutHandle) -> None:
        with self._sending:
            buckets = partial(self._source.broadcast_weights, version, self._bucket_bytes)
            _broadcast(self._source, target, self._timeout, None, buckets)


class Handles(_FromTrainer):
    """Transport in the memory of GPUs that training and rollout share: each tensor-parallel rank of a server maps the
    copy of the training rank on its GPU."""

    def __init__(self, source: TrainingHandle, bucket_bytes: int) -> None:
        super().__init__(source)
        self._bucket_bytes = bucket_bytes

    def send(self, version: int, stored: Any, target: RolloutHandle) -> None:
        with self._sending, closing(self._source.share_weights(version, self._bucket_bytes)) as buckets:
            for shared in buckets:
                names = shared[0][0]
                handles = [shared[rank][1] for rank in target.ranks]
                target.call(UPDATING, DirectReceiver.map_weights, names, handles).result()


def _folder_name(version: int) -> str:
    return f"weight_v{version:06d}"
