"""A model folder of a checkpoint: the actor's weights, without optimizer or critic, by one process.

Import this only where `cairn.engines.training.megatron.backend.backend_for` has prepared megatron-core.
"""

from pathlib import Path

import torch

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.megatron.backend import backend_for
from cairn.engines.training.megatron.checkpoint import load_weights
from cairn.engines.training.megatron.folder import write_model_folder
from cairn.engines.training.megatron.model import join_groups, load_model
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
    training = TrainingConfig.model_validate({"engine": "megatron", "dtype": dtype})
    join_process_group(1)
    join_groups(training)
    actor = load_model(model, training, backend_for(device), trained=False)
    load_weights(store, checkpoint, actor.chunks, device)
    ownership, held = Ownership.agree(actor.parameters), torch.Tensor.detach
    weights = gather(actor.parameters, ownership, actor.config.params_dtype, device, held)
    write_model_folder(model, weights, target, dtype=actor.config.params_dtype, write=True)
