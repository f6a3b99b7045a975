"""What the layers keep of the running samples (see `layer_states`): one slot a sample, each slot filled from position 0
at its own pace.

A slot's content and the arithmetic on it do not depend on the other slots. What lies behind a slot's length is stale
but finite, and masked, so it adds exact zeros; with lengths cut at multiples of `ALIGNMENT` the attention kernels add
them in the same order whatever the cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache

from cairn.engines.rollout.transformers.layer_states import LayerKind, Slots

ALIGNMENT = 16
"""Lengths seen by kernels are multiples of this: the float32 lanes of the widest vector unit, AVX-512."""


def round_up(length: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-length // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Layer:
    """A layer of the model."""

    kind: LayerKind
    heads: tuple[int | None, ...]
    """Of each of its stores; None of a state, which has no positions."""


class KVCache:
    """Slots 0, 1, … for the prompts and responses of samples.

    Args:
        example: a cache that the model has filled; gives shapes, dtypes and device.
        kinds: of the model's layers.
    """

    def __init__(self, example: Cache, kinds: Sequence[LayerKind]) -> None:
        kept = [kind.read(layer) for kind, layer in zip(kinds, example.layers, strict=True)]
        self.layers = [
            Layer(kind, tuple(states.shape[1] if kind.of_positions else None for states in layer))
            for kind, layer in zip(kinds, kept, strict=True)
        ]
        """In the order of `stores`."""
        self.stores = [
            states[:0, :, :0] if kind.of_positions else states[:0]
            for kind, layer in zip(kinds, kept, strict=True)
            for states in layer
        ]
        """Of the first layer, of the second, …: each [slots, heads, capacity, size], or [slots, …] of a state."""
        self.capacity = 0
        """Positions of a slot."""

    @property
    def keeps_beginnings(self) -> bool:
        """Whether a slot still holds, later on, what its sample began with."""
        return all(heads is not None for layer in self.layers for heads in layer.heads)

    def reserve(self, num_slots: int, length: int) -> None:
        """Have room for so many slots and positions; what the slots hold stays. Positions at least double."""
        slots = max(num_slots, self.stores[0].shape[0])
        if length > self.capacity:
            self.capacity = max(round_up(length), 2 * self.capacity)
        self.stores = [
            store if store.shape == shape else F.pad(store, _growth(store.shape, shape))
            for store, shape in zip(self.stores, self.shapes(slots, self.capacity), strict=True)
        ]

    def shapes(self, num_slots: int, capacity: int) -> list[tuple[int, ...]]:
        """Of the stores, with so many slots and positions."""
        return [
            (num_slots, store.shape[1], capacity, store.shape[3]) if grows else (num_slots, *store.shape[1:])
            for store, grows in self._stores()
        ]

    def insert(self, prompts: Cache, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy the prompt `sources[i]` of a prefilled batch into the slot `slots[i]`, from position 0."""
        kept = [
            states
            for layer, prefilled in zip(self.layers, prompts.layers, strict=True)
            for states in layer.kind.read(prefilled)
        ]
        for (store, grows), states in zip(self._stores(), kept, strict=True):
            part = store[:, :, : states.shape[2]] if grows else store
            part.index_copy_(0, slots, states.index_select(0, sources))

    def clear(self, slots: torch.Tensor) -> None:
        """Forget what the slots hold."""
        for store in self.stores:
            store[slots] = 0

    def move(self, sources: torch.Tensor, slots: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of the slot `sources[i]`, and its states, to the slot `slots[i]`."""
        for store, grows in self._stores():
            part = store[:, :, :length] if grows else store
            part.index_copy_(0, slots, part.index_select(0, sources))

    def _stores(self) -> Iterator[tuple[torch.Tensor, bool]]:
        """Each, and whether it has positions."""
        heads = [heads for layer in self.layers for heads in layer.heads]
        return ((store, of is not None) for store, of in zip(self.stores, heads, strict=True))


class StepCache(Cache):
    """What the model's forward pass sees of a `KVCache` when each of the first slots takes one new token.

    Args:
        stores: as `KVCache.stores`.
        layers: as `KVCache.layers`.
        positions: [B], where the new tokens of the slots 0 … B - 1 go.
        length: positions to attend to.
    """

    def __init__(
        self, stores: Sequence[torch.Tensor], layers: Sequence[Layer], positions: torch.Tensor, length: int
    ) -> None:
        rows, offsets = positions.shape[0], {}
        all_heads = [heads for layer in layers for heads in layer.heads]
        for heads, store in zip(all_heads, stores, strict=True):
            if heads is not None and heads not in offsets:
                first = torch.arange(rows * heads, device=positions.device).view(-1, heads) * store.shape[2]
                offsets[heads] = (first + positions[:, None]).view(-1)
        slots, remaining = Slots(rows, length, offsets), iter(stores)
        super().__init__(
            layers=[layer.kind.step([next(remaining) for _ in layer.heads], layer.heads, slots) for layer in layers]
        )


def _growth(shape: Sequence[int], larger: Sequence[int]) -> list[int]:
    """As `F.pad` takes it: the last dimension first."""
    return [
        places for size, other in zip(reversed(shape), reversed(larger), strict=True) for places in (0, other - size)
    ]
