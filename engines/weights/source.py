"""What an actor of the training engine does to give its weights out: as buckets, as broadcasts, as a model folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from cairn.engines.errors import EngineError, WrongVersion
from cairn.engines.weights.layout import Layout
from cairn.storage.space import naming_full

if TYPE_CHECKING:
    import torch

    from cairn.engines.training.base import Sharing, TrainingEngine
    from cairn.engines.weights.buckets import Bucket
    from cairn.engines.weights.group import SendingGroup


class WeightSource:
    """The part of the training actor that rollout engines are served by.

    Rank 0 gives the weights out. The other ranks take part in gathering them: for each export they call `end_export`
    at the same time.
    """

    _export: "Iterator[dict[str, torch.Tensor]]" = iter(())
    _staged: "torch.Tensor | None" = None
    _group: "SendingGroup | None" = None
    _shared: "dict[str, torch.Tensor] | None" = None

    def begin_export(self, version: int, bucket_bytes: int) -> None:
        """Begin to give out the weights of `version`; an export that did not end is dropped.

        Raises:
            WrongVersion: the engine stands elsewhere.
        """
        self._require_version(version)
        self._export = self._started.export_weights(bucket_bytes)

    def next_bucket(self) -> "tuple[Bucket | None, bool]":
        """On rank 0: the next bucket of weights, and whether there was one."""
        from cairn.engines.weights.buckets import pack

        named_tensors = next(self._export, None)
        return (None, False) if named_tensors is None else (pack(named_tensors), True)

    def end_export(self) -> None:
        """Run the export to its end without giving anything out: so do all ranks but 0, for rank 0 to go on. What it
        took of GPU memory is for others, who may share the GPU."""
        import torch

        self._staged = self._shared = None
        for _ in self._export:
            pass
        self._export = iter(())
        torch.cuda.empty_cache()  # nothing where CUDA was never used

    def open_group(self, name: str, timeout: float) -> tuple[str, int]:
        """On rank 0: open the address at which receivers meet. Returns its host and port."""
        from cairn.engines.weights.group import SendingGroup

        self.leave_group()
        host = ray.util.get_node_ip_address()
        self._group = SendingGroup(name, host, timeout)
        return host, self._group.port

    def join_group(self, size: int, backend: str) -> None:
        """On rank 0: wait until all members have met. Raises EngineError."""
        self._sending.join(size, backend)

    def group(self) -> tuple[str, int] | None:
        """On rank 0: name and size of the group it can broadcast in."""
        return (self._group.name, self._group.size) if self._group is not None and self._group.size else None

    def stage_bucket(self, backend: str) -> Layout | None:
        """On rank 0: make the next bucket ready to be broadcast; None if there is none."""
        from cairn.engines.weights.group import flatten

        named_tensors = next(self._export, None)
        if named_tensors is None:
            return None
        layout, flat = flatten(named_tensors)
        self._staged = flat.cuda() if backend == "nccl" else flat
        return layout

    def broadcast_bucket(self) -> None:
        """On rank 0: broadcast the bucket that was made ready. Raises EngineError and EngineTimeout."""
        if self._staged is None:
            raise EngineError("no bucket of weights was made ready to be broadcast")
        self._sending.send(self._staged)

    def release_group(self) -> None:
        """Free those who wait for the group to be complete; answered while the actor waits for it itself."""
        if self._group is not None:
            self._group.release()

    def leave_group(self) -> None:
        """Leave the group: what still waits for a broadcast of it ends with an error."""
        if self._group is not None:
            self._group.leave()
            self._group = None

    def export_hf(self, version: int, folder: Path) -> None:
        """On all ranks: write a model folder with the weights of `version`, in place of one that may be there.

        Raises:
            WrongVersion: the engine stands elsewhere.
            NoSpace: the disk of the folder is full.
        """
        self._require_version(version)
        with naming_full(folder):
            self._started.export_hf(folder)

    def begin_export_on_device(self, version: int, bucket_bytes: int) -> None:
        """On all ranks: begin to give out the weights of `version` from GPU memory. Raises WrongVersion."""
        self._require_version(version)
        self._export = self._sharing.export_on_device(bucket_bytes)

    def share_bucket(self) -> tuple[list[str], bytes] | None:
        """On all ranks: names of the next bucket's weights and a handle on this rank's copy, which lives until the next
        call; None if there is none."""
        from cairn.engines.weights.buckets import in_one_storage
        from cairn.engines.weights.shared import share

        self._shared = None
        named_tensors = next(self._export, None)
        if named_tensors is None:
            return None
        device = next(iter(named_tensors.values())).device
        self._shared = in_one_storage(named_tensors, device)
        return list(self._shared), share(self._shared)

    def remove_folder(self, folder: Path) -> None:
        """On rank 0: remove a model folder that it wrote, or began to write."""
        shutil.rmtree(folder, ignore_errors=True)

    def _require_version(self, version: int) -> None:
        found = self._started.position().weight_version
        if found != version:
            raise WrongVersion(f"the training engine is at weight version {found}, not at {version}")

    @property
    def _sending(self) -> "SendingGroup":
        if self._group is None:
            raise EngineError("the trainer is in no group in which it could broadcast weights")
        return self._group

    @property
    def _sharing(self) -> "Sharing":
        from cairn.engines.training.base import Sharing

        engine = self._started
        if not isinstance(engine, Sharing):
            raise EngineError("the training engine cannot share its GPUs: leave fleet.colocate and offload_train out")
        return engine

    @property
    def _started(self) -> "TrainingEngine":
        raise NotImplementedError
