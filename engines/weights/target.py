"""What an actor of a rollout engine does to take weights."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.engines.errors import EngineError
from cairn.engines.weights.layout import Layout, Meeting, MemoryTag, Receiver

if TYPE_CHECKING:
    from cairn.engines.rollout.base import DirectReceiver, RolloutEngine
    from cairn.engines.weights.buckets import Bucket


class WeightTarget:
    """The part of the rollout actor that the training engine serves; see cairn.engines.rollout.base."""

    def get_weight_version(self) -> int | None:
        return self._started.get_weight_version()

    def begin_weight_update(self, version: int) -> None:
        self._started.begin_weight_update(version)

    def update_weights(self, bucket: "Bucket") -> None:
        from cairn.engines.weights.buckets import unpack

        self._started.update_weights(unpack(bucket))

    def update_weights_from_disk(self, folder: Path) -> None:
        self._started.update_weights_from_disk(folder)

    def receiver(self) -> Receiver:
        return self._receiving.receiver()

    def join_group(self, meeting: Meeting) -> None:
        self._receiving.join_group(meeting)

    def receive_weights(self, layout: Layout) -> None:
        self._receiving.receive_weights(layout)

    def map_weights(self, names: Collection[str], handles: Sequence[bytes]) -> None:
        self._receiving.map_weights(names, handles)

    def leave_group(self) -> None:
        self._receiving.leave_group()

    def end_weight_update(self) -> None:
        self._started.end_weight_update()

    def weights_checksum(self) -> str:
        return self._started.weights_checksum()

    def release_memory(self) -> None:
        self._started.release_memory()

    def resume_memory(self, tag: MemoryTag) -> None:
        self._started.resume_memory(tag)

    @property
    def _receiving(self) -> "DirectReceiver":
        from cairn.engines.rollout.base import DirectReceiver

        engine = self._started
        if not isinstance(engine, DirectReceiver):
            raise EngineError("the rollout engine takes no broadcasts: set fleet.update_weight_transport to tensor")
        return engine

    @property
    def _started(self) -> "RolloutEngine":
        raise NotImplementedError
