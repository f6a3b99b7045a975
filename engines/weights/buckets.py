"""Named tensors as one array of bytes, which travels between processes without being copied on arrival."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

ALIGNMENT = 64
"""Every tensor begins at a multiple of so many bytes: a cache line, and enough for any dtype."""


Layout = tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]


class Bucket(dict[str, torch.Tensor]):
    """Tensors, on any device, that travel packed: the one place where weights are packed and unpacked.

    What arrives are views of the bytes that came: to be read, and no longer than the bucket lives.
    """

    def __reduce__(self) -> Any:
        data, layout = _packed(self, torch.device("cpu"))
        return _unpacked, (data.numpy(), layout)


def _unpacked(data: np.ndarray, layout: Layout) -> Bucket:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it
        return Bucket(_views(torch.from_numpy(data), layout))


def in_one_storage(named_tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies of tensors as views of one storage on a device: a single handle shows them to another process."""
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
