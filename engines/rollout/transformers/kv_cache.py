"""Keys and values of the running samples: one slot a sample, each slot filled from position 0 at its own pace.

A slot's content and the arithmetic on it do not depend on the other slots. What lies behind a slot's length is stale
but finite, and masked, so it adds exact zeros; with lengths cut at multiples of `ALIGNMENT` the attention kernels add
them in the same order whatever the cut.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

ALIGNMENT = 16
"""Lengths seen by kernels are multiples of this: the float32 lanes of the widest vector unit, AVX-512."""


def round_up(length: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-length // ALIGNMENT) * ALIGNMENT


class KVCache:
    """Slots 0, 1, … for the prompts and responses of samples.

    Args:
        example: a cache that the model has filled; gives the layers' heads and head sizes, dtype and device.
    """

    def __init__(self, example: DynamicCache) -> None:
        layers = [(keys, values) for keys, values, *_ in example]
        self.num_heads = [keys.shape[1] for keys, _ in layers]
        """Of keys and values, for each layer."""
        self.stores = [states.new_zeros(0, states.shape[1], 0, states.shape[3]) for layer in layers for states in layer]
        """Keys and values of the first layer, of the second, …: each [slots, heads, capacity, head size]."""

    @property
    def capacity(self) -> int:
        """Positions of a slot."""
        return self.stores[0].shape[2]

    def reserve(self, num_slots: int, length: int) -> None:
        """Have room for so many slots and positions; what the slots hold stays. Positions at least double."""
        slots, capacity = self.stores[0].shape[0], self.capacity
        more_slots = max(num_slots - slots, 0)
        more_positions = max(round_up(length), 2 * capacity) - capacity if length > capacity else 0
        if more_slots or more_positions:
            growth = (0, 0, 0, more_positions, 0, 0, 0, more_slots)
            self.stores = [F.pad(store, growth) for store in self.stores]

    def insert(self, prompts: DynamicCache, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy the prompt `sources[i]` of a prefilled batch into the slot `slots[i]`, from position 0."""
        prefilled = [states for keys, values, *_ in prompts for states in (keys, values)]
        for store, states in zip(self.stores, prefilled, strict=True):
            store[:, :, : states.shape[2]].index_copy_(0, slots, states.index_select(0, sources))

    def clear(self, slots: torch.Tensor) -> None:
        """Forget what the slots hold."""
        for store in self.stores:
            store[slots] = 0

    def move(self, sources: torch.Tensor, slots: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of the slot `sources[i]` to the slot `slots[i]`."""
        for store in self.stores:
            part = store[:, :, :length]
            part.index_copy_(0, slots, part.index_select(0, sources))


class StepCache(Cache):
    """What the model's forward pass sees of a `KVCache` when each of the first slots takes one new token.

    Args:
        stores: as `KVCache.stores`.
        num_heads: as `KVCache.num_heads`.
        positions: [B], where the new tokens of the slots 0 … B - 1 go.
        length: positions to attend to.
    """

    def __init__(
        self, stores: Sequence[torch.Tensor], num_heads: Sequence[int], positions: torch.Tensor, length: int
    ) -> None:
        rows, capacity = positions.shape[0], stores[0].shape[2]
        offsets = {}
        for heads in set(num_heads):
            first = torch.arange(rows * heads, device=positions.device).view(-1, heads) * capacity
            offsets[heads] = (first + positions[:, None]).view(-1)
        super().__init__(
            layers=[
                _StepLayer(stores[2 * i : 2 * i + 2], offsets[heads], rows, length) for i, heads in enumerate(num_heads)
            ]
        )


class _StepLayer(CacheLayerMixin):
    """One layer; `offsets` [B * heads] are rows of a store seen as [slots * heads * capacity, head size]."""

    def __init__(self, stores: Sequence[torch.Tensor], offsets: torch.Tensor, rows: int, length: int) -> None:
        super().__init__()
        self._stores, self._offsets, self._rows, self._length = stores, offsets, rows, length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states [B, heads, 1, head size]; return [B, heads, length, head size] of keys and of values."""
        for store, states in zip(self._stores, (key_states, value_states), strict=True):
            size = store.shape[3]
            store.view(-1, size).index_copy_(0, self._offsets, states.reshape(-1, size))
        keys, values = (store[: self._rows, :, : self._length] for store in self._stores)
        return keys, values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError("the stores exist before the first step")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_cache_shape(self) -> int:
        return self._stores[0].shape[2]
