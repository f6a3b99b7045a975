"""Named tensors as one array of bytes, which travels between processes and is not copied on arrival."""

import io
import warnings
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

from cairn.storage.store.errors import naming_full

ALIGNMENT = 64
"""Every tensor begins at a multiple of this many bytes: a cache line, and enough for any dtype."""


Layout = tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]


class Bucket(dict[str, torch.Tensor]):
    """Tensors, on any device, that travel packed. Weights are packed and unpacked only here.

    Received tensors are views of the received bytes: read-only, and valid no longer than the bucket lives.
    """

    def __reduce__(self) -> Any:
        data, layout = _packed(self, torch.device("cpu"))
        return _unpacked, (data.numpy(), layout)


def _unpacked(data: np.ndarray, layout: Layout) -> Bucket:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is only read
        return Bucket(_views(torch.from_numpy(data), layout))


def in_one_storage(named_tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Return copies of tensors as views of one storage on a device, so that a single handle gives them to another
    process."""
    return _views(*_packed(named_tensors, device))


def _packed(named_tensors: Mapping[str, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, Layout]:
    layout, end = [], 0
    for name, tensor in named_tensors.items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        layout.append((name, tensor.dtype, tuple(tensor.shape), start))
        end = start + tensor.nbytes
    data = torch.empty(end, dtype=torch.uint8, device=device)
    for (_, _, _, start), tensor in zip(layout, named_tensors.values(), strict=True):
        data[start : start + tensor.nbytes].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return data, tuple(layout)


def _views(data: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    return {
        name: data[start : start + dtype.itemsize * int(np.prod(shape))].view(dtype).view(shape)
        for name, dtype, shape, start in layout
    }


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
