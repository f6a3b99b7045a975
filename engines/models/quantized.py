"""Quantised weights of model folders, dequantised while they are read and only as far as the caller reads them.

| `quantization_config` of config.json | in the files | the weight, in float32 |
|---|---|---|
| `fp8`, `weight_block_size: [R, C]` | `X` in float8_e4m3fn, `X_scale_inv` | value × scale of its block of R × C |
| `mxfp4` | `X_blocks`: two E2M1 values per byte, `X_scales` | value × 2^(scale - 127) of its group of 32 |
| `compressed-tensors` | `X_packed`: eight values per int32, `X_scale`, `X_shape` | (value - 8) × scale of its group |

DeepSeek V3, Kimi K2, and Qwen3 and MiniMax-M2 in FP8 use the first form; gpt-oss uses the second (OCP Microscaling
Formats 1.0, 2023, section 5.3); Kimi K2 Thinking uses the third, `pack-quantized` in symmetric 4-bit groups. Weights
that are not quantised are read unchanged. Any other quantisation is rejected with an error that names it.
"""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from cairn.engines.types.errors import BadModel
from cairn.storage.store.canonical import from_json

_E4M3 = "F8_E4M3"
"""safetensors' name for float8_e4m3fn."""


class Slice(Protocol):
    """A tensor of a file of which parts can be read: by slices of its first axes, or whole by `...`."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, key: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class BlockFp8:
    """Blocks with one scale each. The last blocks of a tensor may be smaller."""

    rows: int
    columns: int
    powers_of_two: bool = False
    """Whether all scales are powers of two."""

    suffixes = ("_scale_inv",)
    """Suffixes of the names of a weight's parts. Each name with the first suffix identifies one weight."""

    def of(self, name: str, tensors: Mapping[str, Slice]) -> tuple[str, Slice]:
        stem = name.removesuffix("_scale_inv")
        values, scales = tensors[stem], tensors[name]
        shape = values.get_shape()
        if values.get_dtype() != _E4M3 or len(shape) < 2:
            raise BadModel(
                f"{stem} has shape {tuple(shape)} and dtype {values.get_dtype()}, but {name} scales a matrix of "
                f"{_E4M3}: copy the folder again."
            )
        block = (*[1] * (len(shape) - 2), self.rows, self.columns)
        _require_shape(name, scales, [-(-length // size) for length, size in zip(shape, block, strict=True)])
        return stem, _Fp8Weight(values, scales, block)


@dataclass(frozen=True)
class Mxfp4:
    """Groups of 32 values of a row with one scale each, in tensors of all experts, which the model holds transposed."""

    suffixes = ("_blocks", "_scales")

    def of(self, name: str, tensors: Mapping[str, Slice]) -> tuple[str, Slice]:
        stem = name.rpartition("_")[0]
        blocks, scales = tensors[f"{stem}_blocks"], tensors[f"{stem}_scales"]
        _require_shape(f"{stem}_scales", scales, blocks.get_shape()[:-1])
        return stem, _Mxfp4Weight(blocks, scales)


@dataclass(frozen=True)
class PackedInt4:
    """Groups of consecutive values of a row with one scale each."""

    group: int

    suffixes = (".weight_packed", ".weight_scale", ".weight_shape")

    def of(self, name: str, tensors: Mapping[str, Slice]) -> tuple[str, Slice]:
        stem = name.rpartition("_")[0]
        packed, scales = tensors[f"{stem}_packed"], tensors[f"{stem}_scale"]
        rows, words = packed.get_shape()  # whole groups fill whole words, so `_shape` says nothing more
        _require_shape(f"{stem}_scale", scales, [rows, words * 8 // self.group])
        return stem, _Int4Weight(packed, scales, self.group)


Scheme = BlockFp8 | Mxfp4 | PackedInt4


def quantization_of(folder: Path) -> Scheme | None:
    """Return the quantisation of a folder's weights; None where they are not quantised.

    Raises:
        BadModel: the quantisation is not supported.
    """
    config = from_json((folder / "config.json").read_text())
    try:
        quantization = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
        if not quantization:
            return None
        scheme = quantization_config(quantization)
        method = quantization.get("quant_method")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadModel(
            f"The quantization_config in {folder / 'config.json'} is not one of a published model: copy it again."
        ) from error
    if scheme is None:
        raise BadModel(
            f"The weights in {folder} are quantised by {method} in an unsupported way (fp8 in blocks, mxfp4 and "
            "compressed-tensors' symmetric int4 are supported): set a folder of the model in bfloat16, and use the "
            "quantised one in your own rollout servers"
        )
    return scheme


def quantization_config(config: Mapping[str, Any]) -> Scheme | None:
    """Return the quantisation that a quantization_config describes; None where it is not supported.

    Raises KeyError, TypeError, ValueError or AttributeError where the config is malformed.
    """
    method = config.get("quant_method")
    if method == "fp8" and config.get("weight_block_size"):
        rows, columns = (operator.index(length) for length in config["weight_block_size"])
        if min(rows, columns) < 1:
            raise ValueError(f"blocks of {rows} × {columns}")
        return BlockFp8(rows, columns, config.get("scale_fmt") == "ue8m0")
    if method == "mxfp4":
        return Mxfp4()
    if method == "compressed-tensors" and config.get("format") == "pack-quantized":
        groups = [group["weights"] for group in config["config_groups"].values()]
        kinds = {(g["num_bits"], g["type"], g["strategy"], g["symmetric"], g.get("actorder")) for g in groups}
        if kinds == {(4, "int", "group", True, None)} and len({g["group_size"] for g in groups}) == 1:
            return PackedInt4(groups[0]["group_size"])
    return None


def open_tensors(files: Iterable[Path], scheme: Scheme | None) -> dict[str, Slice]:
    """Return every weight of safetensors files by its name; quantised weights are dequantised to float32.

    Raises:
        BadModel: a part of a quantised weight is missing, or its shape does not fit the other parts.
    """
    tensors: dict[str, Slice] = {}
    for path in files:
        file = safe_open(path, framework="pt")
        tensors |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no mapping
    weights = _dequantized(tensors, scheme)
    if unscaled := [name for name, weight in weights.items() if weight.get_dtype().startswith("F8_")]:
        raise BadModel(f"{unscaled[0]} is in FP8, and its scales are not in the weight files: copy the folder again.")
    return weights


def _dequantized(tensors: dict[str, Slice], scheme: Scheme | None) -> dict[str, Slice]:
    if scheme is None:
        if scales := [name for name in tensors if name.endswith(BlockFp8.suffixes)]:
            raise BadModel(
                f"{scales[0]} scales a quantised weight, and config.json has no quantization_config: copy it again."
            )
        return tensors
    weights = dict(tensors)
    for name in tensors:
        if name.endswith(scheme.suffixes):
            del weights[name]
        if name.endswith(scheme.suffixes[0]):
            try:
                weight, view = scheme.of(name, tensors)
            except KeyError as missing:
                raise BadModel(
                    f"{name} belongs to {missing}, which the weight files lack: copy the folder again."
                ) from None
            except ValueError as error:
                raise BadModel(f"{name} does not belong to a matrix ({error}): copy the folder again.") from error
            weights[weight] = view
    return weights


class Dequantized:
    """A `Slice` whose values are computed when they are read."""

    def get_dtype(self) -> str:
        return "F32"


@dataclass(frozen=True)
class _Fp8Weight(Dequantized):
    values: Slice
    scales: Slice
    block: tuple[int, ...]

    def get_shape(self) -> list[int]:
        return self.values.get_shape()

    def __getitem__(self, key: Any) -> torch.Tensor:
        ranges = _ranges(key, self.get_shape())
        blocks = tuple(
            slice(part.start // size, -(-part.stop // size)) for part, size in zip(ranges, self.block, strict=True)
        )
        scales = self.scales[blocks].float()
        for axis, (part, size) in enumerate(zip(ranges, self.block, strict=True)):
            repeated = scales.repeat_interleave(size, axis)
            scales = repeated.narrow(axis, part.start % size, part.stop - part.start)
        return self.values[ranges].float() * scales


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class _Mxfp4Weight(Dequantized):
    blocks: Slice
    """[experts, out, in / 32, 16]."""
    scales: Slice

    def get_shape(self) -> list[int]:
        experts, rows, groups, half = self.blocks.get_shape()
        return [experts, groups * 2 * half, rows]

    def __getitem__(self, key: Any) -> torch.Tensor:
        experts, columns, rows = _ranges(key, self.get_shape())
        pairs = self.blocks[experts, rows]
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        values = table[torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).int()]
        scaled = torch.ldexp(values, self.scales[experts, rows].int().unsqueeze(-1) - 127)
        return scaled.flatten(-2).transpose(1, 2)[:, columns].contiguous()


@dataclass(frozen=True)
class _Int4Weight(Dequantized):
    packed: Slice
    scales: Slice
    group: int

    def get_shape(self) -> list[int]:
        rows, words = self.packed.get_shape()
        return [rows, words * 8]

    def __getitem__(self, key: Any) -> torch.Tensor:
        rows, columns = _ranges(key, self.get_shape())
        values = (self.packed[rows].unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
        return ((values.flatten(1) - 8) * self.scales[rows].float().repeat_interleave(self.group, 1))[:, columns]


def _ranges(key: Any, shape: list[int]) -> tuple[slice, ...]:
    """Return the range that an index key selects on each axis."""
    keys = () if key is ... else key if isinstance(key, tuple) else (key,)
    return tuple(
        slice(*part.indices(length)[:2])
        for part, length in zip([*keys, *[slice(None)] * (len(shape) - len(keys))], shape, strict=True)
    )


def _require_shape(name: str, tensor: Slice, expected: list[int]) -> None:
    if list(tensor.get_shape()) != expected:
        raise BadModel(
            f"{name} has shape {tuple(tensor.get_shape())} where its weight's shape requires {tuple(expected)}: "
            "weights and config.json are of different models."
        )
