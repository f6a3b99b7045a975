"""Export of a model's weights: whole parameters, or a model folder in Hugging Face format."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, logging

from cairn.configs.schema.training import LoraConfig
from cairn.engines.models.folders import load_causal_lm, save_config
from cairn.engines.models.published import Part, biases_of, published_parts, saved_buffers, writes_other_names
from cairn.engines.training.checkpoint import (
    FILE_BYTES,
    STATE,
    TrainingState,
    actors_parameter,
    read_sealed,
    read_state,
)
from cairn.engines.training.checkpoint import FORMAT as OLDER
from cairn.engines.training.mtp import copy_mtp_layers
from cairn.engines.training.parts import FORMAT, PartsState, Saved, read_parts
from cairn.engines.training.regions import Region
from cairn.engines.training.sharding import Piece, gather_shards, local_part, sharded_weights_checksum
from cairn.engines.training.torch.lora import add_adapters, base_parameters, merged_parameters, save_adapters
from cairn.storage.store.store import Store


def parts_of(model: PreTrainedModel) -> dict[str, tuple[Part, ...]]:
    """Return the exported weights that each tensor of `whole_weights` consists of; adapters are not included."""
    return published_parts(model, (*base_parameters(model), *saved_buffers(model)))


def whole_weights(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype, bucket_bytes: int, *, everywhere: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter in `dtype`, with adapters merged, then the buffers that weight files have, unchanged, on
    the device.

    Shards are gathered from all ranks, on rank 0 or on all of them; offloaded shards are moved to the device first. The
    other ranks yield no parameters but must iterate to the end.
    """
    yield from gather_shards(merged_parameters(model, device), device, dtype, bucket_bytes, everywhere=everywhere)
    for name, buffer in saved_buffers(model):
        yield name, buffer.to(device)


def weights_checksum(
    model: PreTrainedModel, device: torch.device, dtypes: Sequence[torch.dtype], world_size: int
) -> str:
    """Return the checksum of the exported weights, rounded to each of `dtypes` in turn.

    All ranks take part; each reads its own shards.
    """
    parts = parts_of(model)

    def pieces() -> Iterator[Piece]:
        for name, tensor in merged_parameters(model, device):
            local, offset = local_part(tensor)
            for dtype in (*dtypes, torch.float32):
                local = local.to(dtype)
            yield from _pieces(parts[name], local.reshape(-1), offset)
        for name, buffer in saved_buffers(model):  # every rank has them
            local = buffer.float().reshape(-1)
            yield from _pieces(parts[name], local if world_size == 1 or dist.get_rank() == 0 else local[:0], 0)

    return sharded_weights_checksum(pieces(), world_size)


def _pieces(parts: Iterable[Part], local: torch.Tensor, offset: int) -> Iterator[Piece]:
    """Yield the pieces of exported weights in `local`, which is the flattened tensor from element `offset` on."""
    for part in parts:
        first, last = (min(max(place - offset, 0), len(local)) for place in (part.start, part.end))
        yield part.name, part.shape, local[first:last], offset + first - part.start


def save_model_folder(model: PreTrainedModel, weights: dict[str, torch.Tensor], folder: Path, source: Path) -> None:
    """Write config and `weights` (whole, on the CPU) so that `from_pretrained` loads them.

    From `source` come the generation config and the untrained layers (see `cairn.engines.models.published`). The
    library writes the weights, which also undoes the renaming that it does on loading. It reads generation configs that
    it refuses to write, so that of `source` is copied.
    """
    read = model.generation_config
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.generation_config = GenerationConfig()
        if writes_other_names(model):
            parts = published_parts(model, weights.items())
            named = {part.name: part.of(tensor).clone() for name, tensor in weights.items() for part in parts[name]}
            model.save_pretrained(folder, state_dict=named, save_original_format=False)
        else:
            model.save_pretrained(folder, state_dict=dict(weights))  # the library empties what it gets
    finally:
        model.generation_config = read
        if shown:
            logging.enable_progress_bar()
    (folder / GENERATION_CONFIG_NAME).unlink(missing_ok=True)
    if (source / GENERATION_CONFIG_NAME).is_file():
        shutil.copyfile(source / GENERATION_CONFIG_NAME, folder / GENERATION_CONFIG_NAME)
    config = deepcopy(model.config)
    config.dtype = next(iter(weights.values())).dtype  # the library notes that of the model's own parameters
    save_config(config, source, folder)
    copy_mtp_layers(source, folder, config.dtype)


CPU = torch.device("cpu")


def _moved_biases(model: PreTrainedModel, saved: set[str]) -> list[tuple[str, torch.Tensor]]:
    """Return the routers' biases that steps have moved: a checkpoint has them."""
    return [(name, bias) for name, bias in biases_of(model) if name in saved]


def _of_actor(kind: str, name: str) -> bool:
    return actors_parameter(f"{kind}.{name}")


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
    """Write the actor's weights of a checkpoint, of any layout of ranks, in Hugging Face format, in this process alone.

    Adapters are merged; with `adapter`, only the adapters are written, in peft's format. Optimizer and critic are not
    exported.

    Args:
        model: the model folder that the run started from.
        target: the folder to write.
        dtype: number format of the weights. Adapters are float32.

    Raises:
        BadModel: the folder `model` cannot be used, or lacks a layer that an adapter belongs to.
        Damaged: a file of the checkpoint is missing or altered.
    """
    actor = load_causal_lm(model, dtype if lora.r else torch.float32)
    if lora.r:
        add_adapters(actor, lora)
    trained = [(name, parameter.detach()) for name, parameter in actor.named_parameters() if parameter.requires_grad]
    state = read_sealed(store, checkpoint, STATE, {FORMAT: PartsState, OLDER: TrainingState})
    if isinstance(state, PartsState):
        saved = Saved.open(store, checkpoint, state, 1, CPU)
        trained += _moved_biases(actor, {name.partition(".")[2] for name in saved.shapes if actors_parameter(name)})
        whole = [(Region.whole(f"parameters.{name}", tuple(t.shape)), t.view(-1)) for name, t in trained]
        read_parts(store, saved, whole, 1, CPU, actors_parameter)
    else:
        assert isinstance(state, TrainingState)
        trained += _moved_biases(actor, {name for file in state.files for name in file.tensors})
        read_state(store, checkpoint, state, {"parameters": trained}, _of_actor)
    if adapter:
        save_adapters(actor, dict(trained), target)
    else:
        save_model_folder(actor, dict(whole_weights(actor, CPU, dtype, FILE_BYTES)), target, model)
