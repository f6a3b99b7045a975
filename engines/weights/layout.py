"""What processes tell each other about weights and their memory. Plain values: nothing here loads PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MemoryTag = Literal["weights", "kv_cache"]
"""What an engine holds GPU memory for; captured graphs belong to the cache."""

Layout = Sequence[tuple[str, str, tuple[int, ...]]]
"""Name, dtype and shape of each tensor of a bucket, in the order in which their bytes are sent."""


@dataclass(frozen=True)
class Receiver:
    """One engine as a member of the group in which weights are broadcast."""

    ranks: int
    """Processes of it that receive: its tensor-parallel ranks."""
    on_gpu: bool
    group: str | None
    """Name of the group that it is in."""


@dataclass(frozen=True)
class Meeting:
    """Where and how the members of a group meet."""

    name: str
    host: str
    port: int
    backend: str
    """gloo or nccl."""
    size: int
    """Processes, the trainer's included."""
    rank: int
    """Of the receiver's first process."""
