"""Tiny models with quantised weights as published ones have them, by formulas, and what their weights are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.architectures import architecture

BLOCK = (24, 40)
"""Neither divides the sizes of tiny models, nor half of them: blocks lie over the ends of tensors and ranks' parts."""

Tensors = dict[str, torch.Tensor]


def fp8_folder(
    name: str,
    folder: Path,
    more: Tensors | None = None,
    quantize_by: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> Tensors:
    """Write an architecture's model, and `more` tensors, in FP8 of blocks, scales in another file than weights; returns
    its weights. `quantize_by`: gives values and scales of the model's own weights, in place of a formula."""
    return into_fp8(architecture(name).save(folder), more, quantize_by)


def into_fp8(
    folder: Path,
    more: Tensors | None = None,
    quantize_by: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    block: tuple[int, int] = BLOCK,
) -> Tensors:
    """Do so with the model in a folder."""
    stored: Tensors = {}
    weights = load_file(folder / "model.safetensors") | (more or {})
    for index, (key, weight) in enumerate(sorted(weights.items())):
        if is_quantized(key, weight):
            values, scales = fp8_values(weight.shape, index, block) if quantize_by is None else quantize_by(weight)
            stored |= {key: values, f"{key}_scale_inv": scales}
            weights[key] = dequantized(values, scales, block)
        else:
            stored[key] = weight
    kind = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    write(folder, stored, {**kind, "weight_block_size": list(block)})
    return weights


def is_quantized(key: str, weight: torch.Tensor) -> bool:
    """As in published models: neither embeddings nor routers, nor what is no matrix."""
    return weight.dim() == 2 and not any(part in key for part in ("embed_tokens", "lm_head", "mlp.gate.", "router"))


def fp8_values(shape: torch.Size, seed: int, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Every finite number of the format in turn, and scales of about a thousandth."""
    rows, columns = shape
    place = torch.arange(rows * columns).reshape(rows, columns) * 37 + seed
    values = (place % 127 + 128 * (place // 127 % 2)).to(torch.uint8).view(torch.float8_e4m3fn)
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    return values, (1 + torch.arange(blocks[0] * blocks[1]).reshape(blocks) + seed) / 3e5


def dequantized(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = (torch.arange(length) // size for length, size in zip(values.shape, block, strict=True))
    return values.float() * scales[rows][:, columns]


def mxfp4_folder(folder: Path) -> Tensors:
    """Write a gpt-oss whose experts are in MXFP4; returns its weights as transformers dequantises them."""
    architecture("gpt_oss").save(folder)
    stored, weights = load_file(folder / "model.safetensors"), load_file(folder / "model.safetensors")
    for key, weight in weights.items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = weight.shape
            blocks = (torch.arange(experts * rows * columns // 2) * 53 % 256).to(torch.uint8)
            scales = (118 + torch.arange(experts * rows * columns // 32) % 6).to(torch.uint8)
            del stored[key]
            stored[f"{key}_blocks"] = blocks.reshape(experts, rows, columns // 32, 16)
            stored[f"{key}_scales"] = scales.reshape(experts, rows, columns // 32)
            weights[key] = convert_moe_packed_tensors(
                stored[f"{key}_blocks"], stored[f"{key}_scales"], dtype=torch.float32
            ).contiguous()
    write(folder, stored, {"quant_method": "mxfp4"})
    return weights


def int4_folder(name: str, folder: Path, group: int = 32) -> Tensors:
    """Write a model whose experts are in packed INT4; returns its weights."""
    architecture(name).save(folder)
    stored: Tensors = {}
    weights = load_file(folder / "model.safetensors")
    for key, weight in weights.items():
        if ".experts." not in key:
            stored[key] = weight
            continue
        rows, columns = weight.shape
        values = torch.arange(rows * columns).reshape(rows, columns) * 11 % 16
        scales = ((1 + torch.arange(rows * columns // group).reshape(rows, -1) % 50) / 512).bfloat16()
        places = 16 ** torch.arange(8)
        packed = (values.reshape(rows, -1, 8) * places).sum(-1)
        stem = key.removesuffix("weight")
        stored[f"{stem}weight_packed"] = torch.where(packed >= 2**31, packed - 2**32, packed).int()
        stored |= {f"{stem}weight_scale": scales, f"{stem}weight_shape": torch.tensor([rows, columns])}
        weights[key] = (values - 8) * scales.float().repeat_interleave(group, 1)
    kind = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": True}
    write(
        folder,
        stored,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": kind}},
        },
    )
    return weights


def write(folder: Path, tensors: Tensors, quantization: dict[str, Any]) -> None:
    """Write a folder's weights in two files, of which the second has the scales, and how they are quantised."""
    (folder / "model.safetensors").unlink()
    scales = {key: tensor for key, tensor in tensors.items() if "scale" in key}
    files = {"model-00001-of-00002.safetensors": tensors.keys() - scales, "model-00002-of-00002.safetensors": scales}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    set_config(folder, quantization_config=quantization)


def set_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
