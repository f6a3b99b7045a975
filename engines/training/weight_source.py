"""Export of weights from a training rank: as buckets, as broadcasts, as a model folder."""

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal

from cairn.engines.types.errors import EngineError, WrongVersion
from cairn.engines.weights.layout import Layout
from cairn.storage.store.errors import naming_full

if TYPE_CHECKING:
    import torch

    from cairn.engines.training.base import Sharing, TrainingEngine
    from cairn.engines.training.weight_group import SendingGroup
    from cairn.engines.weights.buckets import Bucket
    from cairn.engines.weights.fingerprint import Fingerprints
    from cairn.engines.weights.fp8 import Fp8Weights


class WeightSource:
    """The part of a training rank (`cairn.engines.training.rank`) that serves weights to rollout engines.

    Rank 0 exports the weights. The other ranks take part in gathering them: for each export they call `end_export` at
    the same time. PyTorch is imported by the methods that need it: a rank's process is prepared before.
    """

    _address: str
    """Address of the rank's machine within the cluster."""
    _export: "Iterator[dict[str, torch.Tensor]]" = iter(())
    _staged: "SimpleQueue[torch.Tensor]"
    """Buckets that are ready to be broadcast: the one that is sent, and the next."""
    _copy: "torch.Tensor | None" = None
    """Copy of a bucket that was exported before, ready to be broadcast while the engine works."""
    _shared: "list[dict[str, torch.Tensor]]"
    """Buckets that rollout engines may map: the one in use, and the next."""
    _group: "SendingGroup | None" = None
    """Process group with the receiving engines."""
    _fp8: "Fp8Weights | None" = None
    """Weights that the rollout engines hold in FP8."""
    _sent: "Fingerprints | None" = None
    """Fingerprints of the weights of the last export, where engines hold some in FP8."""

    def checksum_at(self, version: int, dtype: Literal["float32", "bfloat16"]) -> str:
        """Return `TrainingEngine.weights_checksum` of `version`.

        Raises:
            WrongVersion: the engine is at another version.
        """
        self._require_version(version)
        return self._started.weights_checksum(dtype)

    def __init__(self) -> None:
        self._shared = []
        self._staged = SimpleQueue()

    def begin_export(self, version: int, bucket_bytes: int, *, on_device: bool = False) -> None:
        """Begin to export the weights of `version`, on the CPU or on the device; an unfinished export is dropped.

        Raises:
            WrongVersion: the engine is at another version.
        """
        self._require_version(version)
        self._export = self._packed(self._started.export_weights(bucket_bytes, on_device=on_device))

    def next_bucket(self) -> "tuple[Bucket | None, bool]":
        """On rank 0: return the next bucket of weights, and whether there was one."""
        from cairn.engines.weights.buckets import Bucket

        named_tensors = next(self._export, None)
        return (None, False) if named_tensors is None else (Bucket(named_tensors), True)

    def end_export(self) -> None:
        """Run the export to its end without returning anything.

        All ranks except 0 call this so that rank 0 can proceed. The export's GPU memory is released for other processes
        that may share the GPU.
        """
        import torch

        self._shared, self._staged = [], SimpleQueue()
        for _ in self._export:
            pass
        self._export = iter(())
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()  # else memory that a server has mapped stays reserved
        torch.cuda.empty_cache()  # no effect if CUDA was never used

    def sent_checksum(self) -> str | None:
        """On rank 0: return the checksum of the weights of the last export, as engines received them. None where it is
        that of `checksum_at`: engines hold nothing in FP8."""
        return None if self._sent is None else self._sent.checksum()

    def open_group(self, name: str, timeout: float) -> tuple[str, int]:
        """On rank 0: open the address at which the engines meet this rank. Return its host and port."""
        from cairn.engines.training.weight_group import SendingGroup

        self.leave_group()
        self._group = SendingGroup(name, self._address, timeout)
        return self._address, self._group.port

    def join_group(self, size: int, backend: str) -> None:
        """On rank 0: wait until all members have met. Raises EngineError."""
        if self._group is None:
            raise EngineError("no address was opened for the receivers of the weights")
        self._group.join(size, backend)

    def group(self) -> tuple[str, int] | None:
        """On rank 0: return name and size of the group for broadcasts; None before all have met."""
        group = self._group
        return (group.name, group.size) if group is not None and group.size else None

    def stage_bucket(self, backend: str) -> Layout | None:
        """On rank 0: prepare the next bucket for the broadcast, while an earlier one may be sent. Return its layout, or
        None if there is no bucket."""
        from cairn.engines.training.weight_group import flatten

        named_tensors = next(self._export, None)
        if named_tensors is None:
            return None
        layout, flat = flatten(named_tensors, _device(backend))
        self._staged.put(flat)
        return layout

    def broadcast_bucket(self) -> None:
        """On rank 0: broadcast the oldest prepared bucket. Raises EngineError and EngineTimeout."""
        try:
            staged = self._staged.get_nowait()
        except Empty:
            staged = None
        self._broadcast(staged)

    def stage_copy(self, bucket: "Bucket", backend: str) -> Layout:
        """On rank 0: prepare a bucket that was exported before for the broadcast. Return its layout."""
        from cairn.engines.training.weight_group import flatten

        layout, self._copy = flatten(bucket, _device(backend))
        return layout

    def broadcast_copy(self) -> None:
        """On rank 0: broadcast that bucket and drop it. Raises EngineError and EngineTimeout."""
        copy, self._copy = self._copy, None
        self._broadcast(copy)

    def _broadcast(self, tensor: "torch.Tensor | None") -> None:
        if tensor is None or self._group is None:
            raise EngineError("no bucket of weights was made ready to be broadcast, or there is no group for it")
        self._group.send(tensor)

    def release_group(self) -> None:
        """Release all members that wait for the group to be complete; callable while the actor itself waits for it."""
        if self._group is not None:
            self._group.release()

    def leave_group(self) -> None:
        """Leave the group; receivers that still wait for one of its broadcasts fail with an error."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def export_hf(self, version: int, folder: Path) -> None:
        """On all ranks: write a model folder with the weights of `version`, replacing an existing one.

        Raises:
            WrongVersion: the engine is at another version.
            NoSpace: the disk of the folder is full.
        """
        self._require_version(version)
        with naming_full(folder):
            self._started.export_hf(folder)

    def begin_export_on_device(self, version: int, bucket_bytes: int) -> None:
        """On all ranks: begin to export the weights of `version` from GPU memory. Raises WrongVersion."""
        self._require_version(version)
        self._export = self._packed(self._sharing.export_on_device(bucket_bytes))

    def share_bucket(self) -> tuple[list[str], bytes] | None:
        """On all ranks: return the names of the next bucket's weights and a handle on this rank's copy.

        The copy lives until the second call after this one. Returns None if there is no bucket.
        """
        import torch

        from cairn.engines.weights.buckets import in_one_storage, share

        self._shared = self._shared[-1:]
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()  # the servers have unmapped the bucket before the last
        named_tensors = next(self._export, None)
        if named_tensors is None:
            return None
        device = next(iter(named_tensors.values())).device
        shared = in_one_storage(named_tensors, device)
        self._shared.append(shared)
        return list(shared), share(shared)

    def keep_folders(self, parent: Path, names: Collection[str]) -> None:
        """On rank 0: delete all model folders that it wrote, complete or not, except `names`.

        Delete `parent` too if none is left.
        """
        for folder in parent.glob("*"):
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)
        if not names:
            shutil.rmtree(parent, ignore_errors=True)

    def _packed(self, buckets: "Iterator[dict[str, torch.Tensor]]") -> "Iterator[dict[str, torch.Tensor]]":
        if self._fp8 is None:
            return buckets
        from cairn.engines.weights.fingerprint import Fingerprints

        self._sent = Fingerprints()
        return self._recorded(self._fp8.packed(buckets), self._sent)

    def _recorded(
        self, buckets: "Iterator[dict[str, torch.Tensor]]", sent: "Fingerprints"
    ) -> "Iterator[dict[str, torch.Tensor]]":
        import torch

        device = _device("nccl") if torch.cuda.is_initialized() else None
        for bucket in buckets:
            for name, tensor in bucket.items():
                sent.add(name, tensor, device=device)
            yield bucket

    def _require_version(self, version: int) -> None:
        found = self._started.position().weight_version
        if found != version:
            raise WrongVersion(f"the training engine is at weight version {found}, not at {version}")

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


def _device(backend: str) -> "torch.device":
    """Return the device from which a backend sends."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
