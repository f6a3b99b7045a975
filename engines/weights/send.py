"""How weights come from the training engine to the rollout engines: one update of several engines at a time."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from cairn.configs.schema.operations import FleetConfig
from cairn.engines.fleet.calls import Deadline
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.weights.broadcast import send_broadcasts


def send_weights(
    source: TrainingHandle, targets: Sequence[RolloutHandle], version: int, fleet: FleetConfig, *, load_timeout: float
) -> None:
    """Replace the weights of the targets by those of `version`. A target whose update breaks off serves nothing until
    another one ends.

    Args:
        fleet: of it the options of the transport are read.
        load_timeout: seconds that a target may take to load a model folder.

    Raises:
        WrongVersion: the source does not stand at `version`.
        EngineError: an engine died, hung or refused.
    """
    with ExitStack() as held:
        for target in targets:
            held.enter_context(target.alone())
        _on_each(targets, "begin_weight_update", version)
        match fleet.update_weight_transport:
            case "tensor" if all(target.maps_gpu_memory for target in targets):
                _send_handles(source, targets, version, fleet.update_weight_buffer_size)
            case "tensor":
                _send_buckets(source, targets, version, fleet.update_weight_buffer_size)
            case "distributed":
                send_broadcasts(source, targets, version, fleet.update_weight_buffer_size, fleet.call_timeout)
            case "disk":
                held.enter_context(_folder_sent(source, targets, version, fleet, load_timeout))
        _on_each(targets, "end_weight_update")


def _send_buckets(source: TrainingHandle, targets: Sequence[RolloutHandle], version: int, bucket_bytes: int) -> None:
    """Through Ray's object store, from which every engine reads; the next bucket is packed while the last one is
    loaded, so that two exist at a time."""
    with closing(source.export_weights(version, bucket_bytes)) as buckets:
        for bucket in buckets:
            _on_each(targets, "update_weights", bucket)


def _send_handles(source: TrainingHandle, targets: Sequence[RolloutHandle], version: int, bucket_bytes: int) -> None:
    """In the memory of GPUs that training and rollout share: a server's tensor-parallel rank maps the copy of the
    training rank on its GPU."""
    with closing(source.share_weights(version, bucket_bytes)) as buckets:
        for shared in buckets:
            names = shared[0][0]
            calls = [
                (target, target.submit("map_weights", names, [shared[rank][1] for rank in target.ranks]))
                for target in targets
            ]
            for target, call in calls:
                target.finish(call, "map_weights")


@contextmanager
def _folder_sent(
    source: TrainingHandle, targets: Sequence[RolloutHandle], version: int, fleet: FleetConfig, load_timeout: float
) -> Iterator[None]:
    """As a model folder, `<update_weight_disk_dir>/<trainer>/weight_v<version>`, which stays until the targets have
    ended the update: of some of them a part may read longer than they say."""
    assert fleet.update_weight_disk_dir is not None
    folder = Path(fleet.update_weight_disk_dir, source.label, f"weight_v{version:06d}").absolute()
    try:
        source.export_hf(version, folder)
        _on_each(targets, "update_weights_from_disk", folder, timeout=load_timeout)
        yield
    finally:
        if not fleet.update_weight_disk_keep_files:
            source.finish(source.submit("remove_folder", folder), "remove_folder")


def _on_each(targets: Sequence[RolloutHandle], method: str, *args: object, timeout: float | None = None) -> None:
    deadline = Deadline(timeout) if timeout is not None else None
    calls = [(target, target.submit(method, *args)) for target in targets]
    for target, call in calls:
        target.finish(call, method, deadline)
