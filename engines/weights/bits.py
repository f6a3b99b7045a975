"""Raw bits of tensors, as integers of the elements' size."""

import numpy as np
import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SIZES = frozenset(_INTEGERS)
"""Bytes that an element may have."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return [elements], a view of a contiguous tensor's bits."""
    return tensor.detach().view(-1).view(_INTEGERS[tensor.element_size()])


def bit_array(tensor: torch.Tensor) -> np.ndarray:
    """Return [elements], a contiguous CPU tensor's bits in the same memory.

    NumPy works in one thread, where PyTorch's several would wait for each other if ranks share cores. `Tensor.numpy`
    would also forbid for good that the tensor's memory is freed and taken again, which offloading does.
    """
    return np.from_dlpack(bits_of(tensor))
