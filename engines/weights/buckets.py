"""Named tensors as one array of bytes, which travels between processes and is not copied on arrival."""

import io
import warnings
from collections.abc import Iterable, Mapping
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

from cairn.storage.store.errors import naming_full

Entry = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, number format and shape of a tensor."""


class Bucket(dict[str, torch.Tensor]):
    """Tensors, on any device, that travel packed. Weights are packed and unpacked only here.

    Received tensors are views of the received bytes: read-only, and valid no longer than the bucket lives.
    """

    storage: torch.Tensor | None = None
    """[bytes] of all tensors, where they lie in one piece: wider number formats first, without gaps, as SGLang's
    servers read them. So every tensor begins at a multiple of its element size."""

    @classmethod
    def empty(cls, entries: Iterable[Entry], device: torch.device, *, pinned: bool = False) -> "Bucket":
        """Return tensors without content in one piece. `pinned`: on the host, in memory that GPUs copy from and to
        without a detour."""
        entries = list(entries)
        size = sum(dtype.itemsize * prod(shape) for _, dtype, shape in entries)
        return cls.of(torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned), entries)

    @classmethod
    def of(cls, storage: torch.Tensor, entries: Iterable[Entry]) -> "Bucket":
        """Return tensors as views of their bytes."""
        entries, views, start = list(entries), {}, 0
        for name, dtype, shape in sorted(entries, key=lambda entry: -entry[1].itemsize):
            end = start + dtype.itemsize * prod(shape)
            views[name] = storage[start:end].view(dtype).view(shape)
            start = end
        bucket = cls({name: views[name] for name, _, _ in entries})
        bucket.storage = storage
        return bucket

    @property
    def entries(self) -> list[Entry]:
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.items()]

    def on(self, device: torch.device, *, pinned: bool = False) -> "Bucket":
        """Return the bucket in one piece on a device: itself where it is there already."""
        if self.storage is not None and self.storage.device == device:
            return self
        copy = Bucket.empty(self.entries, device, pinned=pinned)
        if self.storage is not None and copy.storage is not None:
            copy.storage.copy_(self.storage)
            return copy
        for name, tensor in self.items():
            copy[name].copy_(tensor.detach())
        return copy

    def on_host(self) -> "Bucket":
        """Return the bucket in one piece on the host, in pinned memory where it was on a GPU."""
        on_gpu = any(tensor.is_cuda for tensor in self.values())
        return self.on(torch.device("cpu"), pinned=on_gpu)

    def __reduce__(self) -> Any:
        packed = self.on_host()
        assert packed.storage is not None
        return _received, (packed.storage.numpy(), packed.entries)


def _received(data: np.ndarray, entries: list[Entry]) -> Bucket:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is only read
        return Bucket.of(torch.from_numpy(data), entries)


def in_one_storage(named_tensors: Mapping[str, torch.Tensor], device: torch.device) -> Bucket:
    """Return tensors as views of one storage on a device, so that a single handle gives them to another process. Copies
    them unless they are that already."""
    bucket = named_tensors if isinstance(named_tensors, Bucket) else Bucket(named_tensors)
    return bucket.on(device)


# Tensors that another process on this machine maps instead of copying, in the format that SGLang's servers unpickle.


DEVICE_ARGUMENT = 6
"""Position of the device's index among the arguments from which a tensor in GPU memory is rebuilt."""


def share(named_tensors: dict[str, torch.Tensor]) -> bytes:
    """Return handles on shared memory or, for tensors on a GPU, on GPU memory. They are valid for one reader, as long
    as the tensors live. Tensors of one storage share a handle. Raises NoSpace where shared memory is full."""
    # File descriptors cannot travel over HTTP; names of files can.
    torch.multiprocessing.set_sharing_strategy("file_system")
    buffer = io.BytesIO()
    handles = [(name, _OnDevice(tensor) if tensor.is_cuda else tensor) for name, tensor in named_tensors.items()]
    with naming_full("/dev/shm"):
        ForkingPickler(buffer).dump(handles)
    return buffer.getvalue()


class _OnDevice:
    """A tensor in GPU memory that is unpickled on the very same GPU, whatever its index is in the reader's process."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> Any:
        rebuild, arguments = reduce_tensor(self._tensor)
        identity = str(torch.cuda.get_device_properties(arguments[DEVICE_ARGUMENT]).uuid)
        return rebuild, (*arguments[:DEVICE_ARGUMENT], identity, *arguments[DEVICE_ARGUMENT + 1 :])
