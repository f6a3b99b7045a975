"""Messages between processes about weights and their memory. All values are plain: nothing here loads PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cairn.storage.store.store import StoredFile

MemoryTag = Literal["weights", "kv_cache"]
"""Purposes of an engine's GPU memory; captured graphs belong to the cache."""

WHOLE, DIFFERENCE = "whole", "difference"
"""First parts of the names of files of weights: see `cairn.engines.weights.versions`."""

Layout = Sequence[tuple[str, str, tuple[int, ...]]]
"""Name, dtype and shape of each tensor of a bucket, in the order in which their bytes are sent."""


@dataclass(frozen=True)
class StoredVersion:
    """Files of one version of the weights."""

    name: str
    """Name for messages: the version, and the commit that holds it."""
    digest: str
    """Checksum of the weights."""
    files: tuple[StoredFile, ...]


def is_whole(files: Sequence[StoredFile]) -> bool:
    """Return whether the files of a version of weights hold it whole, and not as a difference."""
    return all(file.path.rpartition("/")[2].startswith(f"{WHOLE}-") for file in files)


@dataclass(frozen=True)
class Receiver:
    """An engine as a member of the group in which weights are broadcast."""

    ranks: int
    """Number of its processes that receive: its tensor-parallel ranks."""
    on_gpu: bool
    group: str | None
    """Name of the group that the engine is in; None for no group."""


@dataclass(frozen=True)
class Meeting:
    """Place and parameters of a meeting of the members of a group."""

    name: str
    host: str
    port: int
    backend: str
    """`gloo` or `nccl`."""
    size: int
    """Number of processes, the trainer's included."""
    rank: int
    """Rank of the receiver's first process."""
    timeout: float
    """Seconds that the meeting, and each broadcast in the group, may take."""
