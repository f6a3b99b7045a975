"""Fingerprints of tensors: fast where the weights are, exact, and equal however a tensor is split over ranks.

The fingerprint of a tensor is two sums modulo 2^64 of its elements' raw bits, each element times an odd pseudo-random
factor of its position in the flattened tensor. Integer sums do not depend on their order, so the fingerprints of the
parts of a tensor add up to that of the whole. A single altered element always changes both sums, since an odd factor
has an inverse. Other alterations are missed with a probability of about 2^-64 or less. This guards against accidents,
not against an adversary.

This file imports nothing of Cairn, because SGLang's processes load it alone (`cairn.engines.rollout.sglang.plugin`).
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch

_BLOCK = 1 << 16
_AT_A_TIME = 1 << 22
_BLOCKS_AT_A_TIME = 256  # a GPU wants large kernels
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SIZES = frozenset(_INTEGERS)
"""Bytes that an element may have."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return [elements], a view of a contiguous tensor's raw bits, as integers of its elements' size."""
    return tensor.detach().view(-1).view(_INTEGERS[tensor.element_size()])


def bit_array(tensor: torch.Tensor) -> np.ndarray:
    """Return [elements], the raw bits of a contiguous tensor on the CPU, in the same memory.

    NumPy works in one thread, where PyTorch's several would wait for each other if ranks share cores. `Tensor.numpy`
    would also forbid for good that the tensor's memory is freed and taken again, which offloading does.
    """
    return np.from_dlpack(bits_of(tensor))


def fingerprint(tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Return [2] int64 on the tensor's device: the tensor's fingerprint, or its part in the fingerprint of a larger
    tensor of which it is a contiguous piece.

    Args:
        tensor: tensor of any shape and any dtype of 1 to 8 bytes.
        offset: number of elements before it in the flattened whole.
    """
    tensor = tensor.contiguous()
    if not tensor.is_cuda:
        return _on_cpu(bit_array(tensor), offset)
    bits = bits_of(tensor)
    columns = _column_factors(bits.device)
    total = torch.zeros(2, dtype=torch.int64, device=bits.device)
    done = 0
    while (left := bits.numel() - done) > 0:
        block, column = divmod(offset + done, _BLOCK)
        if column or left < _BLOCK:
            rows, width = 1, min(_BLOCK - column, left)
        else:
            rows, width = min(left // _BLOCK, _BLOCKS_AT_A_TIME), _BLOCK
        piece = bits[done : done + rows * width].view(rows, 1, width).to(torch.int64)
        sums = (piece * columns[:, column : column + width]).sum(-1)
        total += (sums * _block_factors(block, rows, bits.device)).sum(0)
        done += rows * width
    return total


def _on_cpu(bits: np.ndarray, offset: int) -> torch.Tensor:
    """Return `fingerprint` of raw bits, block by block, which stay in a core's cache. NumPy takes one thread; PyTorch's
    several would wait for each other after every block, for most of the time where ranks share cores."""
    columns = _column_factors(torch.device("cpu")).numpy()
    total = np.zeros(2, np.int64)
    done = 0
    while (left := len(bits) - done) > 0:
        block, column = divmod(offset + done, _BLOCK)
        width = min(_BLOCK - column, left)
        piece = bits[done : done + width].astype(np.int64)
        total += (
            columns[:, column : column + width].dot(piece) * _block_factors(block, 1, torch.device("cpu"))[0].numpy()
        )
        done += width
    return torch.from_numpy(total)


def digest(tensors: Sequence[tuple[str, Sequence[int], str]], fingerprints: torch.Tensor, *extra: str) -> str:
    """Return SHA-256 over the tensors' (name, shape, dtype) and their fingerprints [n, 2] int64, in the order of their
    names."""
    sums = fingerprints.cpu().tolist()
    lines = sorted(
        f"{name} {tuple(shape)} {dtype} {first} {second}"
        for (name, shape, dtype), (first, second) in zip(tensors, sums, strict=True)
    )
    return hashlib.sha256("\n".join([*extra, *lines]).encode()).hexdigest()


def weights_checksum(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the checksum of a model's weights: equal for equal names, shapes and values, whatever their order and
    device.

    Values count as float32, which holds every bfloat16 and float16 exactly. So weights that were sent as bfloat16 and
    are held as float32 have the checksum of what was sent.
    """
    found = Fingerprints()
    for name, tensor in named_tensors:
        found.add(name, tensor)
    return found.checksum()


class Fingerprints:
    """Fingerprints of tensors as float32, which come one by one. A later tensor of the same name counts instead."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}

    def add(
        self, name: str, tensor: torch.Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        """Add a tensor. Little of it is there as float32 at a time.

        Args:
            dtype: number format that the elements are rounded to first; by default they stay as they are.
            device: device that computes; by default the tensor's.
        """
        parts = tensor.detach().contiguous().view(-1).split(_AT_A_TIME)
        on, rounded = device or tensor.device, dtype or tensor.dtype
        sums = [fingerprint(part.to(on).to(rounded).float(), i * _AT_A_TIME) for i, part in enumerate(parts)]
        self._found[name] = tuple(tensor.shape), torch.stack(sums).sum(0)

    def checksum(self, left_out: Collection[str] = ()) -> str:
        """Return `weights_checksum` of all tensors but some."""
        found = [(name, shape, sums.cpu()) for name, (shape, sums) in self._found.items() if name not in left_out]
        sums = torch.stack([one for _, _, one in found]) if found else torch.zeros(0, 2)
        return digest([(name, shape, "float32") for name, shape, _ in found], sums)


@lru_cache
def _column_factors(device: torch.device) -> torch.Tensor:
    """Return [2, block] int64: the factor of each position within a block."""
    return torch.stack([_odd_factors(0, _BLOCK, salt) for salt in (1, 2)]).to(device)


@lru_cache(maxsize=4096)
def _block_factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return [count, 2] int64: the factor of each block."""
    return torch.stack([_odd_factors(first, count, salt) for salt in (3, 4)], dim=-1).to(device)


def _odd_factors(first: int, count: int, salt: int) -> torch.Tensor:
    """Return [count] int64: the outputs `first`, … of the generator SplitMix64 (Steele et al., OOPSLA 2014) for a seed,
    made odd."""
    with np.errstate(over="ignore"):
        state = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = state + np.uint64(salt << 56)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64))
