"""Keys and values of the running samples: one slot a sample, each slot filled from position 0 at its own pace.

A slot's content and the arithmetic on it do not depend on the other slots. What lies behind a slot's length is stale
but finite, and masked, so it adds exact zeros; with lengths cut at multiples of `ALIGNMENT` the attention kernels add
them in the same order whatever the cut.
"""

from typing import Any

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

ALIGNMENT = 16
"""Lengths seen by kernels are multiples of this: the float32 lanes of the widest vector unit, AVX-512."""


def round_up(length: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-length // ALIGNMENT) * ALIGNMENT


class KVCache(Cache):
    """Slots 0, 1, … of which each decoding step reads and extends the first ones."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.device = device
        self.num_slots = 0
        self.capacity = 0
        """Positions of a slot."""
        self.length = 0
        """Positions that the current step attends to, a multiple of `ALIGNMENT`."""
        self.positions = torch.empty(0, dtype=torch.int64, device=device)
        """[B]: where the current step writes in the slots 0 … B - 1."""
        self._offsets: dict[int, torch.Tensor] = {}
        self._slot_layers = [_SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))

    def reserve(self, num_slots: int, length: int) -> None:
        """Have room for so many slots and positions; what the slots hold stays. Positions at least double."""
        if length > self.capacity:
            self.capacity = max(round_up(length), 2 * self.capacity)
        self.num_slots = max(num_slots, self.num_slots)

    def begin_step(self, positions: torch.Tensor, longest: int) -> None:
        """Set where the next forward pass of one token a slot writes, `longest` being the greatest of `positions`."""
        self.positions = positions
        self.length = round_up(longest + 1)
        self._offsets.clear()

    def offsets(self, num_heads: int) -> torch.Tensor:
        """[B * num_heads]: the current step's rows in a layer seen as [slots * heads * positions, head_dim]."""
        if num_heads not in self._offsets:
            heads = torch.arange(len(self.positions) * num_heads, device=self.device).view(-1, num_heads)
            self._offsets[num_heads] = (heads * self.capacity + self.positions[:, None]).view(-1)
        return self._offsets[num_heads]

    def insert(self, prompts: DynamicCache, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy the prompt `sources[i]` of a prefilled batch into the slot `slots[i]`, from position 0."""
        for layer, (keys, values, *_) in zip(self._slot_layers, prompts, strict=True):
            layer.insert(keys, values, sources, slots)

    def move(self, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy the slot `sources[i]` to the slot `slots[i]`, as far as the last step attended."""
        for layer in self._slot_layers:
            layer.move(sources, slots)


class _SlotLayer(CacheLayerMixin):
    """One layer's keys and values, each [slots, heads, positions, head_dim]."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self._cache = cache
        self._stores: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new token of every slot of the step; return the views of those slots to attend to."""
        self._fit(key_states, value_states)
        for store, states in zip(self._stores, (key_states, value_states), strict=True):
            head_dim = states.shape[3]
            offsets = self._cache.offsets(states.shape[1])
            store.view(-1, head_dim).index_copy_(0, offsets, states.reshape(-1, head_dim))
        rows, length = key_states.shape[0], self._cache.length
        return self._stores[0][:rows, :, :length], self._stores[1][:rows, :, :length]

    def insert(self, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """See `KVCache.insert`."""
        self._fit(keys, values)
        for store, states in zip(self._stores, (keys, values), strict=True):
            store[:, :, : states.shape[2]].index_copy_(0, slots, states.index_select(0, sources))

    def move(self, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """See `KVCache.move`."""
        for store in self._stores:
            seen = store[:, :, : self._cache.length]
            seen.index_copy_(0, slots, seen.index_select(0, sources))

    def _fit(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Have the room that the cache has reserved, new room holding zeros."""
        if not self._stores:
            self.lazy_initialization(key_states, value_states)
        more_slots = self._cache.num_slots - self._stores[0].shape[0]
        more_positions = self._cache.capacity - self._stores[0].shape[2]
        if more_slots or more_positions:
            growth = (0, 0, 0, more_positions, 0, 0, 0, more_slots)
            self._stores = [F.pad(store, growth) for store in self._stores]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the heads and dtype of the states."""
        room = (self._cache.num_slots, self._cache.capacity)
        self._stores = [
            states.new_zeros(room[0], states.shape[1], room[1], states.shape[3])
            for states in (key_states, value_states)
        ]
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length, 0

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_cache_shape(self) -> int:
        return self._cache.capacity
