"""Checksums of the weights in a folder in Hugging Face format."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open

from cairn.engines.models.folders import check_model_folder, load_causal_lm, open_weights, parameter_names
from cairn.engines.models.published import is_exact, is_mtp
from cairn.engines.weights.fingerprint import weights_checksum


def tensors_of(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of safetensors files, one in memory at a time."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                yield name, file.get_tensor(name)


def trained_tensors_of(folder: Path, files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors in files of a model folder, without the layers of `cairn.engines.models.published`. Raises
    BadModel."""
    layers = check_model_folder(folder).get_text_config().num_hidden_layers
    return ((name, tensor) for name, tensor in tensors_of(files) if not is_mtp(name, layers))


def folder_checksum(folder: str | Path, dtype: Literal["float32", "bfloat16"]) -> str:
    """Return `weights_checksum` of a model folder's weights in `dtype`, by the names in its files; tied weights count
    once. It equals that of a run's publication of the same weights, whatever folder they are in. Raises BadModel."""
    check_model_folder(folder)
    names, target = parameter_names(folder), getattr(torch, dtype)
    weights = open_weights(Path(folder)).items()
    return weights_checksum((name, _rounded(name, weight[...], target)) for name, weight in weights if name in names)


def checksums_as(folder: Path, files: Iterable[Path], dtype: torch.dtype) -> Iterator[str]:
    """Yield `weights_checksum` of a model folder's weights in `dtype`: by the names in its files, and then, loaded, by
    the names in the model, which differ for some families."""
    yield weights_checksum((name, _rounded(name, tensor, dtype)) for name, tensor in trained_tensors_of(folder, files))
    yield weights_checksum(load_causal_lm(folder, dtype).named_parameters())


def _rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if is_exact(name) or not tensor.is_floating_point() else tensor.to(dtype)
