"""A model's weights for others: whole parameters, or a model folder in Hugging Face format."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import logging

from cairn.engines.training.mtp import keep_mtp
from cairn.engines.training.sharding import whole
from cairn.engines.training.torch.lora import merged_parameters


def whole_parameters(model: PreTrainedModel, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, adapters merged into it, gathered from all ranks on all of them: on their `device`, which
    offloaded shards return to."""
    for name, part in merged_parameters(model, device):
        yield name, whole(part.to(device)) if isinstance(part, DTensor) else part


def save_model_folder(model: PreTrainedModel, weights: dict[str, torch.Tensor], folder: Path, source: Path) -> None:
    """Write config, generation config and `weights` (whole, on the CPU) so that `from_pretrained` loads them, and the
    layers of `source` that are not trained (see `cairn.engines.mtp`).

    The library does the writing, which also undoes the renaming that it does on loading.
    """
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        if shown:
            logging.enable_progress_bar()
    config = deepcopy(model.config)
    config.dtype = next(iter(weights.values())).dtype  # the library notes that of the model's own parameters
    config.save_pretrained(folder)
    keep_mtp(source, folder, config.dtype)
