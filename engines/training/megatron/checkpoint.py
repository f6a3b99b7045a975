"""Reading of checkpoints that earlier versions of Cairn wrote, in the format of Megatron's dist_checkpointing.

<folder>/__<rank>_<n>.distcp, .metadata, metadata.json   as Megatron writes them: every rank its own part, readable with
                                any layout of ranks. Only tensors are ever read from these files: see metadata.py
<folder>/critic/…               the same for the critic, where there is one
<folder>/reference/…            weights of the reference, where the actor's are copied to it at an interval
<folder>/megatron_state.json    format, weight version, state digest, and of every file its size and SHA-256; carries
                                its own digest; written last

This version writes `cairn.engines.training.parts`.
"""

import hashlib
import logging
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject
from pydantic import Field
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from cairn.engines.training.checkpoint import (
    REFERENCE,
    Described,
    HashedFile,
    check_reference,
    check_trained,
)
from cairn.engines.training.megatron.learner import MegatronLearner, Reference
from cairn.engines.training.megatron.metadata import METADATA, TENSORS, read_metadata, write_folder
from cairn.engines.training.megatron.state import own_loaded_state
from cairn.engines.training.process import gathered
from cairn.engines.training.sharding import raising_together
from cairn.engines.types.errors import EngineError
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store

# It warns of writers in other processes, which are not used here, and of functions that it still calls itself.
logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)


class CheckpointFile(HashedFile):
    """A file of a checkpoint."""

    name: str = Field(pattern=r"^((critic|reference)/)?(\.metadata|[A-Za-z0-9_][A-Za-z0-9_.]*)$")


@contextmanager
def fetched(store: Store, folder: str, files: Sequence[CheckpointFile], device: torch.device) -> Iterator[Path]:
    """Yield a folder, one per machine, that Megatron may read.

    The machine's ranks together fetch and verify the files of tensors. One of these ranks writes the other files anew;
    see metadata.py.

    Raises:
        Damaged: a file is missing, altered, or not what Megatron writes.
        EngineError: another rank could not fetch its files.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hosts = gathered(socket.gethostname(), world_size)
    mates = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    with tempfile.TemporaryDirectory(prefix="cairn-megatron-") as own:
        local = Path(gathered(own, world_size)[mates[0]])
        tensors = [file for file in files if _holds_tensors(file)]
        with raising_together(world_size, device):
            for file in tensors[mates.index(rank) :: len(mates)]:
                _fetch(store, f"{folder}/{file.name}", file, local / Path(file.name).name)
            if rank == mates[0]:
                write_folder(local, _described(store, folder, files, local))
        try:
            yield local
        finally:
            dist.barrier()  # the folder is deleted only when all ranks have read it


def _described(store: Store, folder: str, files: Sequence[CheckpointFile], local: Path) -> Metadata:
    """Return the checkpoint's description of its tensors. Raises Damaged."""
    for file in files:
        if Path(file.name).name == METADATA:
            path = f"{folder}/{file.name}"
            _fetch(store, path, file, local / METADATA)
            try:
                return read_metadata(
                    (local / METADATA).read_bytes(), {Path(other.name).name for other in files if _holds_tensors(other)}
                )
            except ValueError as error:
                raise Damaged(f"checkpoint file {path} is not what Megatron writes: {error}") from error
    raise Damaged(f"checkpoint {folder} is incomplete: {METADATA} is missing")


def _holds_tensors(file: CheckpointFile) -> bool:
    return file.name.endswith(TENSORS)


def _fetch(store: Store, path: str, file: CheckpointFile, local: Path) -> None:
    try:
        store.get_file(path, local)
    except FileNotFoundError as error:
        raise Damaged(f"checkpoint file {path} is missing") from error
    file.check(path, *_sized_and_hashed(local))


def _sized_and_hashed(local: Path) -> tuple[int, str]:
    with local.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), sha256


FORMAT = 1
STATE = "megatron_state.json"
FILE_BYTES = 1 << 30

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
"""Format of the optimizer's state: by parameter, whatever the layout of ranks."""


class MegatronState(Described):
    """Content of `megatron_state.json`."""

    use_distributed_optimizer: bool
    """Whether the distributed optimizer wrote the state. It stores master weights separately, also in float32, so a
    state must be read with the same setting."""
    files: list[CheckpointFile]
    frozen: tuple[str, ...] = ()
    """Hugging Face tensors of the actor without moments."""

    def files_of(self, role: str) -> list[CheckpointFile]:
        """Return the files of the actor, of the critic or of the reference."""
        return [file for file in self.files if (file.name.rpartition("/")[0] or "actor") == role]


def check_state(
    folder: str, state: MegatronState, learners: Mapping[str, MegatronLearner], reference: Reference | None = None
) -> None:
    """Check that these learners can load a checkpoint.

    Raises:
        EngineError: it was written with another setting of `use_distributed_optimizer`, or only one of checkpoint and
            learners has a critic, a reference that changes, or a certain parameter frozen.
    """
    own = learners["actor"].optimizer.config.use_distributed_optimizer
    if state.use_distributed_optimizer != own:
        raise EngineError(
            f"checkpoint {folder} was written with training.megatron.use_distributed_optimizer = "
            f"{str(state.use_distributed_optimizer).lower()}: set it to that, the rest of the layout may differ"
        )
    if bool(state.files_of("critic")) != ("critic" in learners):
        holds, wants = ("a", "none") if state.files_of("critic") else ("no", "one")
        raise EngineError(
            f"checkpoint {folder} has {holds} critic, but algorithm.advantage_estimator requires {wants}: load it with "
            "the algorithm of the run that wrote it"
        )
    check_reference(folder, bool(state.files_of(REFERENCE)), reference is not None)
    check_trained(folder, learners["actor"].state.frozen ^ set(state.frozen))


def load(
    store: Store,
    folder: str,
    state: MegatronState,
    learners: Mapping[str, MegatronLearner],
    reference: Reference | None,
    device: torch.device,
) -> None:
    """Replace weights and moments by saved ones, of any layout of ranks; all ranks take part.

    The optimizer keeps the options of the configuration. The caller must set its step count afterwards.

    Raises:
        Damaged: a file is missing or altered.
    """
    for role, learner in learners.items():
        learner.set_steps(1)  # Megatron omits a count of 0, and torch's Adam does not load without one
        wanted = _sharded_state(learner)
        # The number of optimizers of a model depends on the layout, so everything except tensors is this rank's own. It
        # is not passed to Megatron, which drops empty values. The key separates the tensors from the saved options,
        # with which Megatron would merge them.
        optimizer, wanted["tensors"] = _apart(wanted.pop("optimizer"))
        loaded = _tensors_of(store, folder, state.files_of(role), wanted, device)
        fill(learner.chunks, loaded)
        learner.optimizer.load_state_dict(_together(optimizer, loaded.get("tensors", {})))
        own_loaded_state(learner.optimizer)
    if reference is not None:
        weights = sharded_weights(reference.chunks)
        fill(reference.chunks, _tensors_of(store, folder, state.files_of(REFERENCE), weights, device))


def load_weights(store: Store, folder: str, state: MegatronState, chunks: Sequence[Any], device: torch.device) -> None:
    """Replace a model's weights by those of the saved actor, rounded to the model's number format.

    The optimizer and layout of the saved state do not matter. All ranks take part.

    Raises:
        Damaged: a file is missing or altered.
    """
    fill(chunks, _tensors_of(store, folder, state.files_of("actor"), sharded_weights(chunks), device))


def _tensors_of(
    store: Store, folder: str, files: Sequence[CheckpointFile], wanted: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Return `wanted` with its tensors read from a checkpoint; everything else in it stays this rank's own.

    All ranks take part. Raises Damaged.
    """
    with fetched(store, folder, files, device) as local:
        return read_tensors(local, wanted, folder)


def read_tensors(local: Path, wanted: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return `wanted` with its tensors read from `local`, a folder of this machine that Megatron may read.

    `folder` is the checkpoint's name in errors. Raises Damaged.
    """
    try:
        return dist_checkpointing.load(dict_list_map_inplace(_own_object, wanted), str(local))
    except CheckpointException as errors:
        raise Damaged(f"checkpoint {folder} cannot be read: {_in_short(_first_failure(errors))}") from errors
    except CheckpointingException as error:
        raise Damaged(f"checkpoint {folder} cannot be read: {_in_short(error)}") from error


def _first_failure(errors: CheckpointException) -> BaseException:
    """Return the first failure in PyTorch's exception, which holds those of all ranks.

    PyTorch's exception is not a subclass of Exception.
    """
    return next(iter(errors.failures.values()))[0]


def _in_short(error: BaseException) -> str:
    if "weights_only" in str(error):  # PyTorch suggests to load it without the check
        return "it holds something else instead of a tensor"
    return f"{type(error).__name__}: {error!s:.200}"


def fill(chunks: Sequence[Any], loaded: Mapping[str, Any]) -> None:
    """Load the tensors that were read into a model's chunks."""
    for name, chunk in zip(_names(chunks), chunks, strict=True):
        chunk.load_state_dict(loaded[name])


@dataclass(frozen=True)
class _Place:
    """Placeholder of a tensor."""

    number: int


def _apart(tree: Any) -> tuple[Any, dict[int, ShardedBase]]:
    """Split a tree of dicts and lists into a tree with placeholders and the tensors to read, by placeholder number.

    Changes the tree.
    """
    sharded: dict[int, ShardedBase] = {}

    def taken(value: Any) -> Any:
        if isinstance(value, LocalNonpersistentObject):
            return value.unwrap()
        if not isinstance(value, ShardedBase):
            return value
        place = _Place(len(sharded))
        sharded[place.number] = value
        return place

    return dict_list_map_inplace(taken, tree), sharded


def _together(tree: Any, values: Mapping[int, Any]) -> Any:
    """Return a tree with values in place of its placeholders. Changes the tree."""
    return dict_list_map_inplace(lambda value: values[value.number] if isinstance(value, _Place) else value, tree)


def _own_object(value: Any) -> Any:
    """Replace an object that Megatron saves as a pickle by this rank's own; pickles are never read.

    Such objects hold the modules' calibration for FP8.
    """
    return LocalNonpersistentObject(value.data) if isinstance(value, ShardedObject) else value


def sharded_weights(chunks: Sequence[Any], **metadata: bool) -> dict[str, Any]:
    """Return Megatron's description of what a checkpoint holds of a model's chunks.

    `metadata` are Megatron's own options.
    """
    return {
        name: chunk.sharded_state_dict(metadata={**_METADATA, **metadata})
        for name, chunk in zip(_names(chunks), chunks, strict=True)
    }


def _sharded_state(learner: MegatronLearner) -> dict[str, Any]:
    state = sharded_weights(learner.chunks)
    # A checkpoint stores all layers' tensors of a kind as one tensor, which must be complete. With frozen ones it is
    # not.
    of_moments = sharded_weights(learner.chunks, non_homogeneous_layers=True) if learner.state.frozen else state
    optimizer = learner.optimizer.sharded_state_dict(of_moments, is_loading=True, metadata=dict(_METADATA))
    return {**state, "optimizer": optimizer}


def _names(chunks: Sequence[Any]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
