"""Untrained layers (see `cairn.engines.models.published`) in the model folders that a training engine writes."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cairn.engines.models.folders import INDEX, WEIGHTS, open_weights, read_config, weight_files
from cairn.engines.models.published import is_mtp
from cairn.engines.models.quantized import Dequantized
from cairn.engines.training.checkpoint import in_buckets

FILE_BYTES = 4 << 30


def copy_mtp_layers(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy these layers from one model folder to another, byte for byte, into separate files.

    Quantised weights are dequantised to `dtype`.
    """
    layers = read_config(source).get_text_config().num_hidden_layers
    layers_to_copy = {name: weight for name, weight in open_weights(source).items() if is_mtp(name, layers)}
    if not layers_to_copy:
        return
    files = weight_files(folder)
    if files == [folder / WEIGHTS]:  # this file alone would be read
        files = [files[0].rename(folder / "model-00001.safetensors")]

    values = (
        (name, weight[...].to(dtype) if isinstance(weight, Dequantized) else weight[...])
        for name, weight in layers_to_copy.items()
    )
    for number, bucket in enumerate(in_buckets(values, FILE_BYTES), 1):
        files.append(folder / f"mtp-{number:05d}.safetensors")
        save_file(bucket, files[-1], metadata={"format": "pt"})
    weight_map: dict[str, str] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            weight_map |= dict.fromkeys(file.keys(), path.name)
    total = sum(path.stat().st_size for path in files)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
