"""A model folder of a checkpoint, ours or others': the actor's weights, without optimizer or critic, by one process.

Import this only where `cairn.engines.training.megatron.backend.backend_for` has prepared megatron-core.
"""

import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.metadata import Metadata

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.megatron.backend import backend_for
from cairn.engines.training.megatron.checkpoint import fill, load_weights, read_tensors, sharded_weights
from cairn.engines.training.megatron.folder import write_model_folder
from cairn.engines.training.megatron.metadata import METADATA, TENSORS, read_metadata, write_folder
from cairn.engines.training.megatron.model import join_groups, load_model
from cairn.engines.training.megatron.weights import Ownership, gather
from cairn.engines.training.process import join_process_group
from cairn.engines.types.errors import BadModel
from cairn.storage.store.canonical import from_json
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store

# The weights of checkpoints that others wrote with Megatron, as Megatron-LM and slime do, in the format `torch_dist`.
#
# <folder>/latest_checkpointed_iteration.txt   "release", or the number of an iteration
# <folder>/iter_0000123/ or release/           metadata.json (the format), .metadata, __<rank>_<n>.distcp, common.pt
#
# Of these are read: `metadata.json`, as JSON; `.metadata`, as data (see metadata.py); and the tensors of the model, by
# PyTorch with `weights_only`. `common.pt` and every other pickle is left closed, so what model it is has to be said.
# Layers may be stacked in one tensor, as Megatron-LM does where all are alike, or stand one by one.


TRACKER = "latest_checkpointed_iteration.txt"

_MODEL = ("embedding.", "decoder.", "output_layer.")
"""What the names of a model's tensors begin with; those of layers that predict several tokens ahead are not read."""

_THEIR_NAMES = {"self_attn_bda.norm.": "post_self_attn_layernorm.", "mlp_bda.norm.": "post_mlp_layernorm."}
"""Of what Megatron does not have and others add under names of their own: slime's for the norms of GLM-4."""


def find_torch_dist(source: Path) -> Path | None:
    """The folder of a checkpoint of this kind that `source` is, or whose newest it names; None: it is something else.

    Raises:
        BadModel: it is one of Megatron's in another format.
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
        found = from_json((source / "metadata.json").read_bytes()).get("sharded_backend")
    except (ValueError, AttributeError) as error:
        raise BadModel(f"{source / 'metadata.json'} does not say a format of Megatron's: copy it again") from error
    if found != "torch_dist":
        raise BadModel(f"checkpoint {source} is in Megatron's format {found}: save it with --ckpt-format torch_dist")
    return source


def load_torch_dist(folder: Path, chunks: Sequence[Any]) -> None:
    """Fill a model's chunks with the weights of a checkpoint of any layout, rounded to the model's own number format.
    One rank does it, which holds the whole model.

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
    """The model's tensors under the names, and in the places, that the checkpoint has for them."""
    stacked = not any(re.match(r"decoder\.layers\.\d+\.", name) for name in names)
    singly = any(re.search(r"\.experts\.\d+\.linear_fc", name) for name in names)
    with _alike(chunks) if stacked else nullcontext():
        wanted = sharded_weights(chunks, non_homogeneous_layers=not stacked, singleton_local_shards=singly)
    for value in _sharded(wanted):
        for ours, theirs in _THEIR_NAMES.items():
            if value.key not in names and value.key.replace(ours, theirs) in names:
                value.key = value.key.replace(ours, theirs)
    return wanted


def _sharded(tree: Any) -> list[ShardedTensor | ShardedTensorFactory]:
    return [value for value in nested_values(tree) if isinstance(value, ShardedTensor | ShardedTensorFactory)]


def _stored_as(value: ShardedTensor | ShardedTensorFactory) -> list[str]:
    return [part.key for part in _sharded(value.build())] if isinstance(value, ShardedTensorFactory) else [value.key]


@contextmanager
def _alike(chunks: Sequence[Any]) -> Iterator[None]:
    """Have Megatron take a model's layers for alike, as it does by itself unless their kinds are told one by one."""
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
    """A folder that Megatron may read: the files of tensors, and no others that did not come from here."""
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
        folder: as `cairn.engines.training.megatron.convert.find_torch_dist` finds it.

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
