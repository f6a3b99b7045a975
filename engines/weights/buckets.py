"""Named tensors as one array of bytes, which travels between processes without being copied on arrival."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

ALIGNMENT = 64
"""Every tensor begins at a multiple of so many bytes: a cache line, and enough for any dtype."""


Layout = tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]


@dataclass(frozen=True)
class Bucket:
    """Tensors, packed."""

    data: np.ndarray
    """[bytes] uint8: the tensors one after the other, each aligned."""
    layout: Layout
    """Name, dtype, shape and first byte of each tensor."""


def pack(named_tensors: Mapping[str, torch.Tensor]) -> Bucket:
    """Copy tensors, on any device, into a bucket."""
    data, layout = _packed(named_tensors, torch.device("cpu"))
    return Bucket(data.numpy(), layout)


def unpack(bucket: Bucket) -> dict[str, torch.Tensor]:
    """The tensors of a bucket, as views of its bytes: to be read, and no longer than the bucket lives."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it
        return _views(torch.from_numpy(bucket.data), bucket.layout)


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
