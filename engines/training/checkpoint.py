"""Descriptions of checkpoints, and reading of those that earlier versions of Cairn wrote with the engine `torch`:
parameters and moments as safetensors, whole tensors whatever the layout of ranks.

<folder>/<kind>-00000.safetensors …   of each kind (parameters, exp_avg, exp_avg_sq; reference, where the reference
                                      changes): whole tensors by their Hugging Face names, in files of at most 256 MiB
                                      (a larger tensor has its own)
<folder>/training_state.json          format, weight version, state digest, and of every file its size, SHA-256 and
                                      tensors; carries its own digest; written last
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from cairn.engines.training.sharding import copy_part
from cairn.engines.types.errors import EngineError
from cairn.storage.store.canonical import seal, unseal
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store, StoredFile

FORMAT = 1
STATE = "training_state.json"
FILE_BYTES = 256 << 20
REFERENCE = "reference"
"""Kind of the reference's parameters, where the actor's weights are copied to the reference at an interval."""

NamedTensors = list[tuple[str, torch.Tensor]]


class HashedFile(BaseModel):
    """A file of a checkpoint, as it was written."""

    name: str
    bytes: int
    sha256: str

    def check(self, path: str, size: int, sha256: str) -> None:
        """Raise Damaged unless what was read from `path` has the SHA-256 of what was written."""
        if sha256 != self.sha256:
            raise Damaged(
                f"checkpoint file {path} is damaged: {self.bytes} bytes with SHA-256 {self.sha256} were written, "
                f"{size} bytes with {sha256} were read"
            )


class CheckpointFile(HashedFile):
    """A file of tensors in a checkpoint."""

    name: str = Field(pattern=r"^[a-z_]+-[0-9]{5}\.safetensors$")
    kind: str
    tensors: list[str]


class Described(BaseModel):
    """Fields of a checkpoint's description in every format."""

    format: int
    weight_version: int
    """Weight version; also the position of the learning-rate schedule and the optimizer's step count."""
    state_digest: str


class TrainingState(Described):
    """Content of `training_state.json`."""

    files: list[CheckpointFile]


_TRAINED = ("parameters", "exp_avg", "exp_avg_sq")
"""Kinds of tensors in a state: every parameter has the first, only trained parameters have the moments."""


def in_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Group tensors, in order, into buckets of at most `bucket_bytes`; a larger tensor is a bucket by itself."""
    bucket: dict[str, torch.Tensor] = {}
    bucket_size = 0
    for name, tensor in named_tensors:
        if bucket and bucket_size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, bucket_size = {}, 0
        bucket[name] = tensor
        bucket_size += tensor.nbytes
    if bucket:
        yield bucket


def write_sealed(store: Store, path: str, state: Described) -> StoredFile:
    """Write the description of a checkpoint, which commits it. Raises the store's errors."""
    data = seal(state.model_dump())
    store.write(path, data)
    return StoredFile(path, len(data), hashlib.sha256(data).hexdigest())


def read_sealed(store: Store, folder: str, name: str, kinds: Mapping[int, type[Described]]) -> Described:
    """Return the description of a checkpoint, read from the file `name`. `kinds`: the descriptions by their format.

    Raises:
        Damaged: the file is missing, altered, or of another format.
    """
    path = f"{folder}/{name}"
    try:
        fields = unseal(store.read(path))
        kind = kinds.get(fields.get("format", 0))
        if kind is None:
            readable = " and ".join(map(str, sorted(kinds)))
            raise Damaged(f"checkpoint {path} is of format {fields.get('format')}; this version reads {readable}")
        return kind.model_validate(fields)
    except FileNotFoundError as error:
        raise Damaged(f"checkpoint {folder} is incomplete, or of another training engine: {name} is missing") from error
    except ValueError as error:
        raise Damaged(f"checkpoint {path} is damaged: {error}") from error


def check_reference(folder: str, holds: bool, wants: bool) -> None:
    """Raise EngineError where only one of checkpoint and engine has a reference that changes."""
    if holds != wants:
        stored, required = ("a", "none") if holds else ("no", "one")
        raise EngineError(
            f"checkpoint {folder} holds {stored} reference that changes, but algorithm.ref_update_interval requires "
            f"{required}: set the interval as in the run that wrote it"
        )


def frozen_in(state: TrainingState) -> set[str]:
    """Return the names of a checkpoint's parameters without moments."""
    names = {kind: {name for file in state.files if file.kind == kind for name in file.tensors} for kind in _TRAINED}
    return names["parameters"] - names["exp_avg"] - names["exp_avg_sq"]


def check_trained(folder: str, differing: Set[str]) -> None:
    """Raise EngineError if some parameters are frozen in only one of checkpoint and engine."""
    if differing:
        raise EngineError(
            f"checkpoint {folder} differs in whether {min(differing)} is trained: set "
            "training.only_train_params_name_list and freeze_params_name_list as in the run that wrote it"
        )


@dataclass(frozen=True)
class Holds:
    """What the state of an engine consists of."""

    names: Set[str] | None
    """Names of the actor's tensors of which the frozen ones are listed; None for all."""
    frozen: Set[str]
    """Names of the actor's parameters without moments."""
    critic: bool
    reference: bool
    """Whether a reference that changes is part of the state."""

    def check(self, folder: str, names: Collection[str]) -> None:
        """Raise EngineError if a checkpoint with tensors of these names is of another algorithm, or has other
        parameters frozen."""
        critic = any(name.startswith(f"{_TRAINED[0]}.critic.") for name in names)
        if critic != self.critic:
            holds, wants = ("a", "none") if critic else ("no", "one")
            raise EngineError(
                f"checkpoint {folder} has {holds} critic, but algorithm.advantage_estimator requires {wants}: load it "
                "with the algorithm of the run that wrote it"
            )
        check_reference(folder, any(name.startswith(f"{REFERENCE}.") for name in names), self.reference)
        actor = {name.partition(".")[2] for name in names if name.startswith(f"{_TRAINED[0]}.")}
        actor = {name for name in actor if not name.startswith("critic.")}
        differing = {name for name in actor if f"{_TRAINED[1]}.{name}" not in names} ^ self.frozen
        check_trained(folder, differing if self.names is None else differing & self.names)


def actors_parameter(name: str) -> bool:
    """Return whether a tensor of a state, named by its kind and name, is a parameter of the actor; a model folder or an
    adapter needs only these."""
    return name.startswith("parameters.") and not name.startswith("parameters.critic.")


def read_state(
    store: Store,
    folder: str,
    state: TrainingState,
    kinds: dict[str, NamedTensors],
    wanted: Callable[[str, str], bool] = lambda kind, name: True,
) -> None:
    """Fill tensors, or this rank's parts of them, from the files.

    Each file is verified before any of its values is used. Tensors whose kind and name are not `wanted` are skipped,
    and files with only such tensors are not read.

    Raises:
        Damaged: a file is missing or altered, or tensors are missing, unknown, or of another shape. The message names
            them.
    """
    targets = {kind: dict(named_tensors) for kind, named_tensors in kinds.items()}
    for file in state.files:
        if not any(wanted(file.kind, name) for name in file.tensors):
            continue
        path = f"{folder}/{file.name}"
        for name, value in _read_file(store, path, file).items():
            if not wanted(file.kind, name):
                continue
            target = targets.get(file.kind, {}).pop(name, None)
            if target is None:
                raise Damaged(f"checkpoint file {path} holds {file.kind} of {name}, which the model does not have")
            if target.shape != value.shape or target.dtype != value.dtype:
                raise Damaged(
                    f"checkpoint file {path} holds {name} as {value.dtype} {tuple(value.shape)}, where the model has "
                    f"{target.dtype} {tuple(target.shape)}: it is a checkpoint of another model"
                )
            copy_part(target, value)
    for kind, missing in targets.items():
        if missing:
            raise Damaged(
                f"checkpoint {folder} lacks {kind} of {', '.join(sorted(missing)[:3])} ({len(missing)} in all)"
            )


def _read_file(store: Store, path: str, file: CheckpointFile) -> dict[str, torch.Tensor]:
    try:
        data = store.read(path)
    except FileNotFoundError as error:
        raise Damaged(f"checkpoint file {path} is missing") from error
    file.check(path, len(data), hashlib.sha256(data).hexdigest())
    try:
        return load_safetensors(data)
    except SafetensorError as error:
        raise Damaged(f"checkpoint file {path} is not a safetensors file: {error}") from error
