"""A model folder of a checkpoint, ours or others': the actor's weights, without optimizer or critic, by one process.

Import this only where `cairn.engines.training.megatron.backend.backend_for` has prepared megatron-core.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.megatron.backend import backend_for
from cairn.engines.training.megatron.checkpoint import load_weights
from cairn.engines.training.megatron.folder import write_model_folder
from cairn.engines.training.megatron.model import join_groups, load_model
from cairn.engines.training.megatron.torch_dist import load_torch_dist
from cairn.engines.training.megatron.weights import Ownership, gather
from cairn.engines.training.process import join_process_group
from cairn.storage.store import Store


def export_checkpoint(
    store: Store, checkpoint: str, model: Path, target: Path, *, dtype: str, device: torch.device
) -> None:
    """Write the weights of a checkpoint, of any layout of ranks, in Hugging Face format.

    Args:
        model: the folder that its run began with.
        target: the folder to write.
        dtype: of the weights, "float32" or "bfloat16".

    Raises:
        BadModel: the folder `model` cannot be used, or Megatron has no mapping for its model.
        Damaged: a file of the checkpoint is missing or altered.
    """
    with _whole_model(model, target, dtype, device) as chunks:
        load_weights(store, checkpoint, chunks, device)


def export_torch_dist(folder: Path, model: Path, target: Path, *, dtype: str, device: torch.device) -> None:
    """The same of a checkpoint that others wrote with Megatron.

    Args:
        folder: as `cairn.engines.training.megatron.torch_dist.find_torch_dist` finds it.

    Raises:
        BadModel: the folder `model` cannot be used, Megatron has no mapping for its model, or the checkpoint is of
            another one.
        Damaged: a file of the checkpoint is not what Megatron writes.
    """
    with _whole_model(model, target, dtype, device) as chunks:
        load_torch_dist(folder, chunks)


@contextmanager
def _whole_model(model: Path, target: Path, dtype: str, device: torch.device) -> Iterator[list[Any]]:
    """A model to be filled, on this rank alone, which is written when it is."""
    training = TrainingConfig.model_validate({"engine": "megatron", "dtype": dtype})
    join_process_group(1)
    join_groups(training)
    actor = load_model(model, training, backend_for(device), trained=False)
    yield actor.chunks
    ownership, held = Ownership.agree(actor.parameters), torch.Tensor.detach
    weights = gather(actor.parameters, ownership, actor.config.params_dtype, device, held)
    write_model_folder(model, weights, target, dtype=actor.config.params_dtype, write=True)
