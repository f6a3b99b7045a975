"""A training state in a store, in the format of Megatron's dist_checkpointing.

<folder>/__<rank>_<n>.distcp, .metadata, common.pt, metadata.json   as Megatron writes them: every rank its own part,
                                                                    read again by any layout of ranks
<folder>/critic/…               the same of the critic, where there is one
<folder>/megatron_state.json    format, weight version, state digest, and of every file its size and SHA-256; carries
                                its own digest; written last

Every rank writes its part in files of about `FILE_BYTES` to a folder of its own machine, and copies each into the store
while it writes the next. A file is hashed on its way and not read back.
"""

import hashlib
import queue
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from pydantic import BaseModel, Field

from engines.errors import EngineError
from engines.training.checkpoint import Described, read_sealed, write_sealed
from engines.training.megatron.learner import MegatronLearner
from engines.training.sharding import raise_together
from storage.errors import Damaged
from storage.store import Store, StoredFile

FORMAT = 1
STATE = "megatron_state.json"
FILE_BYTES = 1 << 30
UPLOADS_AT_A_TIME = 4

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
"""How the optimizer's state is written: by parameter, whatever the layout of ranks."""


class CheckpointFile(BaseModel):
    """One file."""

    name: str = Field(pattern=r"^(critic/)?[A-Za-z0-9_.]+$")
    bytes: int
    sha256: str


class MegatronState(Described):
    """What `megatron_state.json` holds."""

    use_distributed_optimizer: bool
    """Which writes master weights apart, also in float32; a state is read with the same setting."""
    files: list[CheckpointFile]


def save(
    store: Store, folder: str, learners: Mapping[str, MegatronLearner], *, weight_version: int, state_digest: str
) -> list[StoredFile]:
    """Write the state of actor and critic; all ranks take part. Returns all files on rank 0, none elsewhere. Raises
    what the store raises."""
    device = next(learners["actor"].chunks[0].parameters()).device
    error: Exception | None = None
    mine: list[CheckpointFile] = []
    for role, learner in learners.items():
        with tempfile.TemporaryDirectory(prefix="cairn-megatron-") as local, Uploads(store, folder, role) as uploads:
            _write(_sharded_state(learner, loading=False), Path(local), uploads.begin)
            try:
                mine += uploads.end(Path(local))
            except Exception as failure:  # raised below, once every rank has come here
                error = failure
    raise_together(error, dist.get_world_size(), device)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    files = [file for held in every for file in held]
    stored: list[StoredFile] = []
    try:
        if dist.get_rank() == 0:
            state = MegatronState(
                format=FORMAT,
                weight_version=weight_version,
                state_digest=state_digest,
                use_distributed_optimizer=learners["actor"].optimizer.config.use_distributed_optimizer,
                files=files,
            )
            stored = [StoredFile(f"{folder}/{file.name}", file.bytes, file.sha256) for file in files]
            stored.append(write_sealed(store, f"{folder}/{STATE}", state))
    except Exception as failure:
        error = failure
    raise_together(error, dist.get_world_size(), device)
    return stored


def read_description(store: Store, folder: str) -> MegatronState:
    """What a folder says it holds. Raises Damaged."""
    return read_sealed(store, folder, STATE, MegatronState, FORMAT)


def load(
    store: Store, folder: str, state: MegatronState, learners: Mapping[str, MegatronLearner], device: torch.device
) -> None:
    """Replace weights and moments by saved ones, of any layout of ranks; all ranks take part. Options of the optimizer
    stay those of the configuration.

    Raises:
        Damaged: a file is missing or altered.
        EngineError: it was written with another setting of `use_distributed_optimizer`, or only one of the two has a
            critic.
    """
    own = learners["actor"].optimizer.config.use_distributed_optimizer
    if state.use_distributed_optimizer != own:
        raise EngineError(
            f"checkpoint {folder} was written with training.megatron.use_distributed_optimizer = "
            f"{str(state.use_distributed_optimizer).lower()}: set it so, every other part of the layout may differ"
        )
    files = {role: [file for file in state.files if _role_of(file) == role] for role in ("actor", "critic")}
    if bool(files["critic"]) != ("critic" in learners):
        holds, wants = ("a", "none") if files["critic"] else ("no", "one")
        raise EngineError(
            f"checkpoint {folder} has {holds} critic, and algorithm.advantage_estimator asks for {wants}: load it with "
            "the algorithm of the run that wrote it"
        )
    for role, learner in learners.items():
        optimizer = learner.optimizer
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        with _fetched(store, folder, files[role], device) as local:
            loaded = dist_checkpointing.load(_sharded_state(learner, loading=True), str(local))
        for name, chunk in zip(_names(learner.chunks), learner.chunks, strict=True):
            chunk.load_state_dict(loaded[name])
        optimizer.load_state_dict(loaded["optimizer"])
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)


def _role_of(file: CheckpointFile) -> str:
    return "critic" if file.name.startswith("critic/") else "actor"


def _sharded_state(learner: MegatronLearner, *, loading: bool) -> dict[str, Any]:
    state = {
        name: chunk.sharded_state_dict(metadata=dict(_METADATA))
        for name, chunk in zip(_names(learner.chunks), learner.chunks, strict=True)
    }
    state["optimizer"] = learner.optimizer.sharded_state_dict(state, is_loading=loading, metadata=dict(_METADATA))
    return state


def _names(chunks: Sequence[Any]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def _write(state: dict[str, Any], folder: Path, written: Callable[[Path], None]) -> None:
    """Let Megatron plan who writes what, and write in this process. Its own writers are forked, which a process that
    runs Ray's threads must not do, and report over a manager, a process that outlives a rank that is killed.

    Args:
        written: called with every file of tensors that is complete. What is in it was copied to the host only then.
    """
    filesystem_async._results_queue = queue.Queue()
    held = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(state))
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1 + held // FILE_BYTES)
    request = dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=True)
    if request.async_fn is not None:
        _, buckets, results = request.async_fn_args
        transforms, _ = request.async_fn.args
        ended: queue.Queue[Any] = queue.Queue()
        running: queue.Queue[int] = queue.Queue()
        done = {}
        for index, bucket in enumerate(buckets):
            (on_host,) = FileSystemWriterAsync.preload_tensors([bucket])
            running.put(index)
            FileSystemWriterAsync.write_preloaded_data(transforms, index, on_host, ended, running, use_fsync=False)
            done[index] = ended.get()[1]
            if not isinstance(done[index], Exception):
                written(Path(on_host[0]))
        failed = [result for result in done.values() if isinstance(result, Exception)]
        results.put(failed[0] if failed else done)
    for finalize in request.finalize_fns:
        finalize()


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in nested_values(state):
        if isinstance(data := getattr(value, "data", None), torch.Tensor):
            yield data


class Uploads:
    """Files on their way from a folder of this machine into the store, several at a time."""

    def __init__(self, store: Store, folder: str, role: str) -> None:
        self._store, self._folder, self._below = store, folder, "" if role == "actor" else f"{role}/"
        self._pool = ThreadPoolExecutor(UPLOADS_AT_A_TIME, thread_name_prefix="checkpoint")
        self._pending: list[Future[CheckpointFile]] = []

    def __enter__(self) -> "Uploads":
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, local: Path) -> None:
        """Copy a file into the store, and remove it here."""
        self._pending.append(self._pool.submit(self._upload, local))

    def end(self, local: Path) -> list[CheckpointFile]:
        """Copy what else is in a folder; returns all files once they are in the store. Raises what the store raises."""
        sent = [pending.result() for pending in self._pending]
        rest = self._pool.map(self._upload, sorted(local.iterdir()))
        return sorted([*sent, *rest], key=lambda file: file.name)

    def _upload(self, local: Path) -> CheckpointFile:
        with local.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
        name = self._below + local.name
        self._store.put_file(local, f"{self._folder}/{name}")
        local.unlink()
        return CheckpointFile(name=name, bytes=size, sha256=sha256)


@contextmanager
def _fetched(store: Store, folder: str, files: Sequence[CheckpointFile], device: torch.device) -> Iterator[Path]:
    """The files in a folder of each machine, fetched and checked by its ranks together."""
    rank = dist.get_rank()
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    mates = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    with tempfile.TemporaryDirectory(prefix="cairn-megatron-") as own:
        folders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(folders, own)
        local = Path(folders[mates[0]])
        error: Exception | None = None
        try:
            for file in files[mates.index(rank) :: len(mates)]:
                _fetch(store, f"{folder}/{file.name}", file, local / Path(file.name).name)
        except Exception as failure:  # raised below, once every rank has come here
            error = failure
        raise_together(error, dist.get_world_size(), device)
        try:
            yield local
        finally:
            dist.barrier()  # the folder goes only when all have read it


def _fetch(store: Store, path: str, file: CheckpointFile, local: Path) -> None:
    try:
        found = store.sha256(path)
        if found != (file.bytes, file.sha256):
            raise Damaged(
                f"checkpoint file {path} is damaged: {file.bytes} bytes with SHA-256 {file.sha256} were written, "
                f"{found[0]} bytes with {found[1]} were read"
            )
        store.get_file(path, local)
    except FileNotFoundError as error:
        raise Damaged(f"checkpoint file {path} is missing") from error
