"""Lossless differences between two versions of weights: the elements whose bits changed, compressed.

An optimizer step of RL changes few bits of weights in bfloat16: most updates are smaller than half the distance to the
next number, and are rounded away. So a difference holds, for the concatenated elements of some tensors,

| part | content of each changed element | bytes |
|---|---|---|
| gaps | number of unchanged elements before it; a byte of 255 stands for 255 of them and continues | 1 or more |
| steps | new bits − old bits as an integer with the sign in the lowest bit (zigzag) | its size |

Bytes of equal significance are stored together, and compressed by zstd. Bits are compared and never numbers, so NaN,
−0.0 and infinities are kept as they are. Elements of 1, 2, 4 and 8 bytes are stored apart.

A difference is a safetensors file whose metadata list the changed tensors. It means nothing without the very tensors
that it was made from; `cairn.engines.weights.versions` ensures that.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from cairn.engines.weights.fingerprint import SIZES, bit_array, bits_of
from cairn.storage.store.canonical import from_json

FORMAT = "1"
_LONGEST_GAP = 255
_BLOCK = 2**17
"""Elements that are decoded at once: what is computed of them stays in the processor's cache."""
_LEVEL = 1
"""Level of zstd. Higher ones are slower and save nothing: what is left is close to the entropy of gaps and signs."""


@dataclass(frozen=True)
class Change:
    """Some changed elements of a tensor."""

    name: str
    positions: torch.Tensor
    """[changed] int32 or int64: places in the flattened tensor, ascending."""
    steps: torch.Tensor
    """[changed] integers of the element's size: new bits − old bits, modulo 2^bits."""

    def apply_to(self, tensor: torch.Tensor) -> None:
        """Change the bits of the tensor in place, on its device; it must be contiguous."""
        device = tensor.device
        bits_of(tensor).index_add_(0, self.positions.to(device), self.steps.to(device))


def encode(pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> bytes:
    """Return the difference between tensors on the CPU: (name, old, new) of equal dtype and shape, each contiguous."""
    changed: list[tuple[str, str, tuple[int, ...]]] = []
    sizes: dict[int, _Encoder] = {}
    for name, old, new in pairs:
        if old.dtype != new.dtype or old.shape != new.shape:
            raise ValueError(f"{name} was {old.dtype} {tuple(old.shape)} and is {new.dtype} {tuple(new.shape)}")
        if sizes.setdefault(old.element_size(), _Encoder()).add(bit_array(old), bit_array(new)):
            changed.append((name, str(old.dtype).removeprefix("torch."), tuple(old.shape)))
    parts = {f"{size}.{part}": array for size, encoder in sizes.items() for part, array in encoder.parts(size).items()}
    counts = {str(size): (encoder.changed, encoder.gap_bytes) for size, encoder in sizes.items() if encoder.changed}
    header = {"tensors": changed, "counts": counts}
    return save_arrays(parts, metadata={"cairn.difference": FORMAT, "header": json.dumps(header)})


class _Encoder:
    """Changed elements of one size, of one tensor after the other."""

    def __init__(self) -> None:
        self.changed = self.gap_bytes = 0
        self._unchanged = 0
        """Unchanged elements since the last changed one."""
        self._gaps: list[np.ndarray] = []
        self._steps: list[np.ndarray] = []

    def add(self, old: np.ndarray, new: np.ndarray) -> bool:
        """Add a tensor, if any of its elements changed; return whether one did."""
        positions = np.flatnonzero(old != new)
        if not len(positions):
            return False
        gaps = np.diff(positions, prepend=-1) - 1
        gaps[0] += self._unchanged
        self._unchanged = len(old) - 1 - int(positions[-1])
        self._gaps.append(gaps)
        self._steps.append(new[positions] - old[positions])
        self.changed += len(positions)
        return True

    def parts(self, size: int) -> dict[str, np.ndarray]:
        """Return the compressed parts; none without a changed element."""
        if not self.changed:
            return {}
        more, last = np.divmod(np.concatenate(self._gaps), _LONGEST_GAP)
        gaps = np.full(len(last) + int(more.sum()), _LONGEST_GAP, np.uint8)
        gaps[np.cumsum(more + 1) - 1] = last
        self.gap_bytes = len(gaps)
        steps = np.concatenate(self._steps)
        signed = steps.view(f"i{size}")
        zigzag = ((signed << 1) ^ (signed >> (8 * size - 1))).astype(f"<i{size}")
        planes = zigzag.view(np.uint8).reshape(-1, size).T
        return {"gaps": _compressed(gaps), "steps": _compressed(np.ascontiguousarray(planes))}


def decode(data: bytes, tensors: Mapping[str, torch.Tensor]) -> Iterator[Change]:
    """Yield the changes in a difference to some of `tensors`, of which only names, dtypes and shapes are read.

    Raises ValueError, saying what is wrong, for broken bytes, and for a difference that was made from other tensors.
    Nothing is decompressed before that is known: a few bytes could claim any number of changes.
    """
    header = _header(data)
    try:
        parts = load_arrays(data)
        entries = [(str(name), _dtype(dtype), tuple(map(int, shape))) for name, dtype, shape in header["tensors"]]
        counts = {int(size): (int(changed), int(length)) for size, (changed, length) in header["counts"].items()}
    except (SafetensorError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"its header is broken: {error}") from None
    if {dtype.itemsize for _, dtype, _ in entries} != counts.keys():
        raise ValueError("its tensors do not match its elements")
    if len({name for name, _, _ in entries}) < len(entries):
        raise ValueError("it changes a tensor twice")
    for name, dtype, shape in entries:
        tensor = tensors.get(name)
        if tensor is None:
            raise ValueError(f"it changes {name}, which the version before it does not have")
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, and the difference was made from {dtype} {shape}"
            )
    for size, (changed, length) in counts.items():
        yield from _changes(parts, size, changed, length, [entry for entry in entries if entry[1].itemsize == size])


def _changes(
    parts: dict[str, np.ndarray],
    size: int,
    changed: int,
    length: int,
    entries: list[tuple[str, torch.dtype, tuple[int, ...]]],
) -> Iterator[Change]:
    """Yield the changes of the tensors of one element size."""
    elements = sum(prod(shape) for _, _, shape in entries)
    if not 0 < changed <= elements or not changed <= length <= changed + elements // _LONGEST_GAP:
        raise ValueError(f"{changed} changes of {elements} elements in {length} bytes are not possible")
    gaps = _decompressed(parts, f"{size}.gaps", length)
    planes = _decompressed(parts, f"{size}.steps", changed * size).reshape(size, changed)
    tensors = ((name, prod(shape)) for name, _, shape in entries)
    (name, room), start, found, passed = next(tensors), 0, 0, 0
    for begin in range(0, length, _BLOCK):
        block = gaps[begin : begin + _BLOCK]
        last = block != _LONGEST_GAP
        ends = np.cumsum(block + last, dtype=np.int32)  # at most 255 for each byte
        here, next_passed = int(np.count_nonzero(last)), passed + int(ends[-1])
        if found + here > changed or next_passed > elements:
            raise ValueError(f"its gaps lead beyond {changed} changes of {elements} elements")
        if here < len(block):
            ends = ends[last]
        steps, taken = _steps(planes[:, found : found + here]), 0
        while taken < here:
            limit = min(max(start + room - passed, 0), int(ends[-1]))
            if (upto := int(np.searchsorted(ends, np.int32(limit), "right"))) > taken:
                places = np.add(ends[taken:upto], passed - start - 1, dtype=np.int32 if room < 2**31 else np.int64)
                yield Change(name, torch.from_numpy(places), torch.from_numpy(steps[taken:upto]))
                taken = upto
            else:
                start, (name, room) = start + room, next(tensors)
        found, passed = found + here, next_passed
    if found < changed or gaps[-1] == _LONGEST_GAP:
        raise ValueError(f"its gaps lead to {found} changes, and it has {changed}")


def _steps(planes: np.ndarray) -> np.ndarray:
    """Return [changed] integers from [size, changed], their bytes."""
    size = len(planes)
    zigzag = planes[-1].astype(f"<u{size}")
    for plane in planes[-2::-1]:
        zigzag <<= 8
        zigzag |= plane
    sign = -(zigzag & 1)
    zigzag >>= 1
    zigzag ^= sign
    return zigzag.view("u1" if size == 1 else f"<i{size}")


def _header(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    try:
        metadata = from_json(data[8 : 8 + length])["__metadata__"]
        version, header = metadata["cairn.difference"], metadata["header"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it is not a difference of weights: {error!s:.200}") from None
    if version != FORMAT:
        raise ValueError(f"it is a difference of format {version!s:.20}, this version of Cairn reads format {FORMAT}")
    try:
        parsed = from_json(header)
    except (ValueError, TypeError) as error:
        raise ValueError(f"its header is broken: {error!s:.200}") from None
    if not isinstance(parsed, dict):
        raise ValueError("its header is broken: it is no mapping")
    return parsed


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize not in SIZES:
        raise ValueError(f"{name!s:.40} is no number format")
    return dtype


def _compressed(data: np.ndarray) -> np.ndarray:
    return np.frombuffer(pa.Codec("zstd", _LEVEL).compress(data.reshape(-1)), np.uint8)


def _decompressed(parts: dict[str, np.ndarray], name: str, size: int) -> np.ndarray:
    part = parts.get(name)
    if part is None or part.dtype != np.uint8:
        raise ValueError(f"it lacks its part {name}")
    try:
        return np.frombuffer(pa.Codec("zstd").decompress(pa.py_buffer(part), size), np.uint8)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise ValueError(f"its part {name} cannot be decompressed: {error!s:.200}") from None
