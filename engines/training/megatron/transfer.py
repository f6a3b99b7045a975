"""Files of a checkpoint on their way between this machine and a store, hashed where they lie on this machine."""

import hashlib
import socket
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field
from torch.distributed.checkpoint.metadata import Metadata

from cairn.engines.training.megatron.metadata import METADATA, TENSORS, read_metadata, write_folder
from cairn.engines.training.sharding import raise_together
from cairn.storage.errors import Damaged
from cairn.storage.store import Store

UPLOADS_AT_A_TIME = 4


class CheckpointFile(BaseModel):
    """One file."""

    name: str = Field(pattern=r"^((critic|reference)/)?(\.metadata|[A-Za-z0-9_][A-Za-z0-9_.]*)$")
    bytes: int
    sha256: str


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
        size, sha256 = _sized_and_hashed(local)
        name = self._below + local.name
        self._store.put_file(local, f"{self._folder}/{name}")
        local.unlink()
        return CheckpointFile(name=name, bytes=size, sha256=sha256)


@contextmanager
def fetched(store: Store, folder: str, files: Sequence[CheckpointFile], device: torch.device) -> Iterator[Path]:
    """A folder of each machine that Megatron may read: the files of tensors, fetched and checked by the machine's ranks
    together, and what one of these makes of the others; see metadata.py.

    Raises:
        Damaged: a file is missing, altered, or not what Megatron writes.
        EngineError: another rank could not fetch its files.
    """
    rank = dist.get_rank()
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    mates = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    with tempfile.TemporaryDirectory(prefix="cairn-megatron-") as own:
        folders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(folders, own)
        local = Path(folders[mates[0]])
        error: Exception | None = None
        tensors = [file for file in files if _holds_tensors(file)]
        try:
            for file in tensors[mates.index(rank) :: len(mates)]:
                _fetch(store, f"{folder}/{file.name}", file, local / Path(file.name).name)
            if rank == mates[0]:
                write_folder(local, _described(store, folder, files, local))
        except Exception as failure:  # raised below, once every rank has come here
            error = failure
        raise_together(error, dist.get_world_size(), device)
        try:
            yield local
        finally:
            dist.barrier()  # the folder goes only when all have read it


def _described(store: Store, folder: str, files: Sequence[CheckpointFile], local: Path) -> Metadata:
    """What the checkpoint says of its tensors. Raises Damaged."""
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
    found = _sized_and_hashed(local)
    if found != (file.bytes, file.sha256):
        raise Damaged(
            f"checkpoint file {path} is damaged: {file.bytes} bytes with SHA-256 {file.sha256} were written, "
            f"{found[0]} bytes with {found[1]} were read"
        )


def _sized_and_hashed(local: Path) -> tuple[int, str]:
    with local.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), sha256
