"""Tensors that another process on this machine maps instead of copying: what SGLang's servers unpickle."""

import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

from cairn.storage.space import naming_full

DEVICE_ARGUMENT = 6
"""Position of the device's index among what a tensor in GPU memory is rebuilt from."""


def share(named_tensors: dict[str, torch.Tensor]) -> bytes:
    """Handles on shared memory or, for tensors on a GPU, on theirs: good for one reader, as long as the tensors live.
    Tensors of one storage share a handle. Raises NoSpace where shared memory is full."""
    # Descriptors cannot travel over HTTP, names of files can.
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
