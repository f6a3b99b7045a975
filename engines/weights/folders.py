"""What the weight files of a folder in Hugging Face format hold."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open

from cairn.engines.models import check_model_folder, load_causal_lm, open_weights, parameter_names
from cairn.engines.mtp import is_mtp
from cairn.engines.published import is_exact
from cairn.engines.weights.checksum import weights_checksum


def tensors_of(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of safetensors files, one in memory at a time."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                yield name, file.get_tensor(name)


def trained_tensors_of(folder: Path, files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of files of a model folder, without the layers of `cairn.engines.mtp`. Raises BadModel."""
    layers = check_model_folder(folder).get_text_config().num_hidden_layers
    return ((name, tensor) for name, tensor in tensors_of(files) if not is_mtp(name, layers))


def folder_checksum(folder: str | Path, dtype: Literal["float32", "bfloat16"]) -> str:
    """`weights_checksum` of a model folder's weights in `dtype`, by the names that its files have, tied ones once: that
    of a run's publication of the same weights, whatever folder they lie in. Raises BadModel."""
    check_model_folder(folder)
    names, target = parameter_names(folder), getattr(torch, dtype)
    weights = open_weights(Path(folder)).items()
    return weights_checksum((name, _rounded(name, weight[...], target)) for name, weight in weights if name in names)


def checksums_as(folder: Path, files: Iterable[Path], dtype: torch.dtype) -> Iterator[str]:
    """`weights_checksum` of a model folder's weights in `dtype`: by the names that its files have, and then, loaded, by
    those that the model has, which differ for some families."""
    yield weights_checksum((name, _rounded(name, tensor, dtype)) for name, tensor in trained_tensors_of(folder, files))
    yield weights_checksum(load_causal_lm(folder, dtype).named_parameters())


def _rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if is_exact(name) else tensor.to(dtype)
