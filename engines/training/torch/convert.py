"""A model folder or an adapter of a checkpoint: the actor's weights, without optimizer or critic, by one process."""

from pathlib import Path

import torch

from cairn.configs.schema.lora import LoraConfig
from cairn.engines.biases import biases_of
from cairn.engines.models import load_causal_lm
from cairn.engines.training.checkpoint import actors_parameters, read_description, read_state
from cairn.engines.training.torch.export import save_model_folder, whole_weights
from cairn.engines.training.torch.lora import add_adapters, save_adapters
from cairn.storage.store import Store

CPU = torch.device("cpu")


def export_checkpoint(
    store: Store,
    checkpoint: str,
    model: Path,
    target: Path,
    *,
    dtype: torch.dtype,
    lora: LoraConfig,
    adapter: bool = False,
) -> None:
    """Write the weights of a checkpoint, of any layout of ranks, in Hugging Face format; adapters merged, or, for
    `adapter`, these alone in peft's.

    Args:
        model: the folder that its run began with.
        target: the folder to write.
        dtype: of the weights. Adapters are float32.

    Raises:
        BadModel: the folder `model` cannot be used, or lacks a layer that an adapter belongs to.
        Damaged: a file of the checkpoint is missing or altered.
    """
    actor = load_causal_lm(model, dtype if lora.r else torch.float32)
    if lora.r:
        add_adapters(actor, lora)
    trained = [(name, parameter.detach()) for name, parameter in actor.named_parameters() if parameter.requires_grad]
    state = read_description(store, checkpoint)
    saved = {name for file in state.files for name in file.tensors}
    trained += [(name, bias) for name, bias in biases_of(actor) if name in saved]  # which steps have moved
    read_state(store, checkpoint, state, {"parameters": trained}, actors_parameters)
    if adapter:
        save_adapters(actor, dict(trained), target)
    else:
        save_model_folder(actor, dict(whole_weights(actor, CPU, dtype)), target, model)
