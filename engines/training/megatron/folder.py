"""Writing of a model folder in Hugging Face format, tensor by tensor."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from cairn.engines.models.folders import INDEX, WEIGHTS, read_config, save_config
from cairn.engines.training.checkpoint import in_buckets
from cairn.engines.training.mtp import copy_mtp_layers

FILE_BYTES = 4 << 30


def write_model_folder(
    source: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    *,
    dtype: torch.dtype,
    write: bool,
    with_images: bool = False,
) -> None:
    """Write weights, with the config and the untrained layers (see `cairn.engines.models.published`) of their source.

    At most one file's weights are held at a time.

    Args:
        source: the folder with config.json and, where there is one, generation_config.json.
        weights: by their names in the files of `source`.
        dtype: number format of the weights, for config.json.
        write: False on a rank that only takes part in gathering.
        with_images: whether the part of the model that sees images is among the weights.
    """
    files: dict[str, list[str]] = {}
    total = 0
    for number, bucket in enumerate(in_buckets(weights, FILE_BYTES), 1):
        if write:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"model-{number:05d}.safetensors"
            save_file(bucket, folder / name, metadata={"format": "pt"})
            files[name] = list(bucket)
            total += sum(tensor.nbytes for tensor in bucket.values())
    if not write:
        return
    if len(files) == 1:
        (folder / next(iter(files))).rename(folder / WEIGHTS)
    else:
        final = {name: f"{name.removesuffix('.safetensors')}-of-{len(files):05d}.safetensors" for name in files}
        for name, whole_name in final.items():
            (folder / name).rename(folder / whole_name)
        weight_map = {tensor: final[name] for name, tensors in files.items() for tensor in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    config = read_config(source) if with_images else read_config(source).get_text_config()
    config.dtype = dtype
    save_config(config, source, folder)
    copy_mtp_layers(source, folder, dtype)
    if (source / "generation_config.json").is_file():
        shutil.copy(source / "generation_config.json", folder)
