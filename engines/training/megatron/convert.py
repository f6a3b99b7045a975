"""Export of a model folder from a checkpoint, our own or one of another Megatron trainer.

One process exports the actor's weights, without optimizer or critic.

Other trainers, such as Megatron-LM and slime, write checkpoints in the format `torch_dist`:

<folder>/latest_checkpointed_iteration.txt   "release", or the number of an iteration
<folder>/iter_0000123/ or release/           metadata.json (the format), .metadata, __<rank>_<n>.distcp, and
                                             from older versions common.pt

Of these, `metadata.json` is read as JSON, `.metadata` as data (see metadata.py), and the tensors of the model by
PyTorch with `weights_only`. `common.pt` and every other pickle is never opened, so the caller must name the model.
Layers may be stacked in one tensor, as Megatron-LM does where all are alike, or stored separately.

Import this only where `cairn.engines.training.megatron.backend.backend_for` has prepared megatron-core.
"""

import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.metadata import Metadata

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.checkpoint import actors_parameter, read_sealed
from cairn.engines.training.megatron.backend import backend_for
from cairn.engines.training.megatron.checkpoint import FORMAT as OLDER
from cairn.engines.training.megatron.checkpoint import (
    STATE,
    MegatronState,
    fill,
    load_weights,
    read_tensors,
    sharded_weights,
)
from cairn.engines.training.megatron.folder import FILE_BYTES, write_model_folder
from cairn.engines.training.megatron.gathering import Replica, gather
from cairn.engines.training.megatron.metadata import METADATA, TENSORS, read_metadata, write_folder
from cairn.engines.training.megatron.model import Model, join_groups, load_model
from cairn.engines.training.megatron.weights import regions
from cairn.engines.training.parts import FORMAT, PartsState, Saved, read_parts
from cairn.engines.training.process import join_process_group
from cairn.engines.types.errors import BadModel
from cairn.storage.store.canonical import from_json
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store

# Checkpoints of other trainers in the format `torch_dist`.


TRACKER = "latest_checkpointed_iteration.txt"

_MODEL = ("embedding.", "decoder.", "output_layer.")
"""Prefixes of a model's tensors; those of layers that predict several tokens ahead are not read."""

_FOREIGN_NAMES = {"self_attn_bda.norm.": "post_self_attn_layernorm.", "mlp_bda.norm.": "post_mlp_layernorm."}
"""Our names of modules that Megatron lacks, and the names that others use: slime's for the norms of GLM-4."""


def find_torch_dist(source: Path) -> Path | None:
    """Return the folder of a `torch_dist` checkpoint: `source` itself, or the newest checkpoint that `source` names.

    Returns None for anything else.

    Raises:
        BadModel: a Megatron checkpoint in another format.
    """
    if (source / TRACKER).is_file():
        newest = (source / TRACKER).read_text().strip()
        source /= "release" if newest == "release" else f"iter_{int(newest):07d}" if newest.isdecimal() else newest
    if any(source.glob("mp_rank_*")):
        raise BadModel(
            f"checkpoint {source} is in Megatron's format torch, a pickle: save it with --ckpt-format torch_dist"
        )
    if not (source / "metadata.json").is_file() or not (source / METADATA).is_file():
        return None
    try:
        backend = from_json((source / "metadata.json").read_bytes()).get("sharded_backend")
    except (ValueError, AttributeError) as error:
        raise BadModel(f"{source / 'metadata.json'} does not name a Megatron format: copy it again") from error
    if backend != "torch_dist":
        raise BadModel(f"checkpoint {source} is in Megatron's format {backend}: save it with --ckpt-format torch_dist")
    return source


def load_torch_dist(folder: Path, chunks: Sequence[Any]) -> None:
    """Fill a model's chunks with the weights of a checkpoint of any layout, rounded to the model's own number format.

    One rank, which holds the whole model, calls this.

    Raises:
        Damaged: `.metadata` or a tensor is not what Megatron writes.
        BadModel: the checkpoint is of another model.
    """
    files = {path.name for path in folder.glob(f"*{TENSORS}")}
    try:
        metadata = read_metadata((folder / METADATA).read_bytes(), files)
    except ValueError as error:
        raise Damaged(f"checkpoint file {folder / METADATA} is not what Megatron writes: {error}") from error
    names = metadata.state_dict_metadata.keys()
    wanted = _wanted(chunks, names)
    own = {name for value in _sharded(wanted) for name in _stored_as(value)}
    model = {name for name in names if name.startswith(_MODEL) and "_extra_state" not in name}
    if differing := sorted(own ^ model):
        raise BadModel(
            f"checkpoint {folder} {'holds' if differing[0] in names else 'lacks'} {differing[0]}: it is of another "
            "model than the folder that --model names, or its layers are not Megatron's own"
        )
    with _readable(folder, files, metadata) as local:
        fill(chunks, read_tensors(local, wanted, str(folder)))


def _wanted(chunks: Sequence[Any], names: Collection[str]) -> dict[str, Any]:
    """Return the model's tensors under the names and at the places that the checkpoint uses."""
    stacked = not any(re.match(r"decoder\.layers\.\d+\.", name) for name in names)
    singly = any(re.search(r"\.experts\.\d+\.linear_fc", name) for name in names)
    with _alike(chunks) if stacked else nullcontext():
        wanted = sharded_weights(chunks, non_homogeneous_layers=not stacked, singleton_local_shards=singly)
    for value in _sharded(wanted):
        for name, foreign_name in _FOREIGN_NAMES.items():
            if value.key not in names and value.key.replace(name, foreign_name) in names:
                value.key = value.key.replace(name, foreign_name)
    return wanted


def _sharded(tree: Any) -> list[ShardedTensor | ShardedTensorFactory]:
    return [value for value in nested_values(tree) if isinstance(value, ShardedTensor | ShardedTensorFactory)]


def _stored_as(value: ShardedTensor | ShardedTensorFactory) -> list[str]:
    return [part.key for part in _sharded(value.build())] if isinstance(value, ShardedTensorFactory) else [value.key]


@contextmanager
def _alike(chunks: Sequence[Any]) -> Iterator[None]:
    """Make Megatron treat a model's layers as alike within the context.

    Megatron does so by itself unless the kind of each layer is listed.
    """
    config = chunks[0].config
    kinds = config.moe_layer_freq
    if isinstance(kinds, list) and all(kinds):
        config.moe_layer_freq = 1
    try:
        yield
    finally:
        config.moe_layer_freq = kinds


@contextmanager
def _readable(folder: Path, files: set[str], metadata: Metadata) -> Iterator[Path]:
    """Yield a folder that Megatron may read: the files of tensors, and otherwise only files that we wrote."""
    with tempfile.TemporaryDirectory(prefix="cairn-megatron-") as room:
        for name in files:
            (Path(room) / name).symlink_to((folder / name).resolve())
        write_folder(Path(room), metadata)
        yield Path(room)


def export_checkpoint(
    store: Store, checkpoint: str, model: Path, target: Path, *, dtype: str, device: torch.device
) -> None:
    """Write the weights of a checkpoint, of any layout of ranks, in Hugging Face format.

    Args:
        model: the model folder that the run started from.
        target: the folder to write.
        dtype: number format of the weights, "float32" or "bfloat16".

    Raises:
        BadModel: the folder `model` cannot be used, or Megatron has no mapping for its model.
        Damaged: a file of the checkpoint is missing or altered.
    """
    state = read_sealed(store, checkpoint, STATE, {FORMAT: PartsState, OLDER: MegatronState})
    with _whole_model(model, target, dtype, device) as actor:
        if isinstance(state, PartsState):
            saved = Saved.open(store, checkpoint, state, 1, device)
            weights = (
                part
                for parameter in actor.parameters
                for part in regions("parameters.", parameter.blocks, parameter.value.detach().view(-1))
            )
            read_parts(store, saved, weights, 1, device, actors_parameter)
        else:
            assert isinstance(state, MegatronState)
            load_weights(store, checkpoint, state, actor.chunks, device)


def export_torch_dist(folder: Path, model: Path, target: Path, *, dtype: str, device: torch.device) -> None:
    """Write the weights of a checkpoint that others wrote with Megatron, in Hugging Face format.

    Args:
        folder: from `cairn.engines.training.megatron.convert.find_torch_dist`.

    Raises:
        BadModel: the folder `model` cannot be used, Megatron has no mapping for its model, or the checkpoint is of
            another one.
        Damaged: a file of the checkpoint is not what Megatron writes.
    """
    with _whole_model(model, target, dtype, device) as actor:
        load_torch_dist(folder, actor.chunks)


@contextmanager
def _whole_model(model: Path, target: Path, dtype: str, device: torch.device) -> Iterator[Model]:
    """Yield a model to fill, on this rank alone. Write the model folder once they are filled."""
    training = TrainingConfig.model_validate({"engine": "megatron", "dtype": dtype})
    join_process_group(1)
    join_groups(training)
    actor = load_model(model, training, backend_for(device), trained=False)
    yield actor
    buckets = gather(
        actor.parameters,
        Replica.agree(actor.parameters),
        actor.config.params_dtype,
        device,
        torch.Tensor.detach,
        FILE_BYTES,
    )
    weights = chain.from_iterable(bucket.on_host().items() for bucket in buckets)
    write_model_folder(model, weights, target, dtype=actor.config.params_dtype, write=True)
