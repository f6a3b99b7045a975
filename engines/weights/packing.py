"""The order in which whole weights are gathered from the ranks that hold their parts: in buckets, to which each owner
contributes one packed message.

Weights of the same owners follow one another, so that few owners contribute to a bucket. Weights of one module stay
together, because servers fuse some of them on arrival.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod

import torch

ALIGNMENT = 8
"""Every part of a message begins at a multiple of this many bytes: enough for any number format."""


@dataclass(frozen=True)
class Whole:
    """A weight to gather."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    held: Mapping[int, int]
    """Elements that each of its owners contributes, by the owner's place in the group."""

    @cached_property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @cached_property
    def owners(self) -> tuple[int, ...]:
        return tuple(sorted(self.held))

    @cached_property
    def module(self) -> str:
        """Name of the module that the weight's projection belongs to, such as a layer's attention."""
        return self.name.rpartition(".")[0].rpartition(".")[0]

    def contribution(self, owner: int) -> int:
        """Return the bytes of an owner's part, padded to `ALIGNMENT`."""
        return -(-self.held.get(owner, 0) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Packing:
    """A bucket: the weights that are gathered together."""

    weights: tuple[Whole, ...]

    @cached_property
    def lengths(self) -> dict[int, int]:
        """Bytes of each owner's message."""
        owners = sorted({owner for weight in self.weights for owner in weight.owners})
        return {owner: sum(weight.contribution(owner) for weight in self.weights) for owner in owners}

    def places(self, owner: int) -> Iterator[tuple[Whole, int]]:
        """Yield the weights that an owner contributes to, and where each part begins in its message."""
        start = 0
        for weight in self.weights:
            if owner in weight.held:
                yield weight, start
                start += weight.contribution(owner)


def packings(weights: Sequence[Whole], bucket_bytes: int) -> list[Packing]:
    """Divide weights into buckets of at most `bucket_bytes`; a module whose weights are larger is a bucket by itself.
    The result is the same on every rank."""
    owners_of: dict[str, set[int]] = {}
    for weight in weights:
        owners_of.setdefault(weight.module, set()).update(weight.owners)
    ordered = sorted(weights, key=lambda one: (sorted(owners_of[one.module]), one.module, one.name))
    buckets: list[Packing] = []
    bucket: list[Whole] = []
    size = 0
    for _, ones in groupby(ordered, lambda one: one.module):
        module = list(ones)
        module_size = sum(weight.nbytes for weight in module)
        if bucket and size + module_size > bucket_bytes:
            buckets.append(Packing(tuple(bucket)))
            bucket, size = [], 0
        bucket += module
        size += module_size
    return [*buckets, Packing(tuple(bucket))] if bucket else buckets
