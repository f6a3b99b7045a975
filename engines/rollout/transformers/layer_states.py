"""What the layers of a model keep of a sample's tokens, by kind of layer: how it is read off a prefilled prompt, and
how the model's forward pass meets it when each slot takes one new token.

| kind of layer | keeps |
|---|---|
| full or sliding attention | keys and values of every position |
| sparse attention | the same, and the indexer's keys |
| linear attention (gated delta networks) | a state: the convolution's last inputs, and the recurrent one |

Of what is kept of every position, a slot still holds what its sample began with, and padding on the right never enters
it. A state is all that came before: it cannot be taken back, so prompts are prefilled without padding for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)


@dataclass(frozen=True)
class Slots:
    """The slots of a step, as its layers see them."""

    rows: int
    """The first ones, which take a token each."""
    length: int
    """Positions to attend to."""
    offsets: dict[int, torch.Tensor]
    """For each number of heads, [rows * heads]: where the new positions are in a store that is seen as [slots * heads *
    capacity, size]."""


class _AttentionStep(CacheLayerMixin):
    """Keys and values of slots, which attention extends."""

    def __init__(self, stores: Sequence[torch.Tensor], heads: Sequence[int | None], slots: Slots) -> None:
        super().__init__()
        self._stores, self._heads, self._slots = stores, heads, slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states [B, heads, 1, size]; return [B, heads, length, size] of keys and of values."""
        return self._extend(0, key_states), self._extend(1, value_states)

    def _extend(self, index: int, states: torch.Tensor) -> torch.Tensor:
        store, size = self._stores[index], self._stores[index].shape[3]
        offsets = self._slots.offsets[cast(int, self._heads[index])]
        store.view(-1, size).index_copy_(0, offsets, states.reshape(-1, size))
        return store[: self._slots.rows, :, : self._slots.length]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError("the stores exist before the first step")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slots.length, 0

    def get_seq_length(self) -> int:
        return self._slots.length

    def get_max_cache_shape(self) -> int:
        return self._stores[0].shape[2]


class _IndexedStep(_AttentionStep):
    """The same with the indexer's keys, which have one head."""

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the new keys [B, 1, size]; return [B, length, size]."""
        return self._extend(2, indexer_key_states.unsqueeze(1)).squeeze(1)


class _LinearStep(LinearAttentionCacheLayerMixin):
    """The states of slots, which the layer replaces."""

    def __init__(self, stores: Sequence[torch.Tensor], heads: Sequence[int | None], slots: Slots) -> None:
        super().__init__()
        self.conv_states, self.recurrent_states = (store[: slots.rows] for store in stores)
        self.has_previous_state = True  # before the first token it is zeros

    def update_conv_state(self, conv_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("a step of one token replaces the convolution's inputs in place")

    def update_recurrent_state(self, recurrent_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return cast(torch.Tensor, self.recurrent_states).copy_(recurrent_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the stores exist before the first step")


@dataclass(frozen=True)
class LayerKind:
    """What layers of one kind have in common."""

    prefilled: type
    """The library's cache of such a layer, for prompts."""
    read: Callable[[Any], tuple[torch.Tensor, ...]]
    """What a prefilled one keeps: each [P, heads, S, size] with every position, or [P, …] if it is a state."""
    of_positions: bool
    """Whether it keeps every position, rather than states."""
    step: Callable[
        [Sequence[torch.Tensor], Sequence[int | None], Slots], CacheLayerMixin | LinearAttentionCacheLayerMixin
    ]
    """What the forward pass meets in a step, made of the layer's stores, their heads, and the slots."""


def _keys_and_values(layer: DynamicLayer) -> tuple[torch.Tensor, ...]:
    """None where the layer attends to those of another one."""
    return () if layer.keys is None or layer.values is None else (layer.keys, layer.values)


def _with_indexer(layer: DynamicIndexedLayer) -> tuple[torch.Tensor, ...]:
    """Layers that take the selection of another one have no indexer."""
    keys = layer.indexer_keys
    return _keys_and_values(layer) + (() if keys is None else (keys.unsqueeze(1),))


def _states(layer: Any) -> tuple[torch.Tensor, ...]:
    return layer.conv_states, layer.recurrent_states


_ATTENTION = LayerKind(DynamicLayer, _keys_and_values, True, _AttentionStep)
KINDS = {
    "full_attention": _ATTENTION,
    "sliding_attention": _ATTENTION,
    "deepseek_sparse_attention": LayerKind(DynamicIndexedLayer, _with_indexer, True, _IndexedStep),
    "linear_attention": LayerKind(LinearAttentionLayer, _states, False, _LinearStep),
}
"""By the names of `config.layer_types`."""


def prompt_cache(kinds: Sequence[LayerKind]) -> Cache:
    """An empty cache of the library for a model with such layers, which keeps all positions of sliding ones too."""
    return Cache(layers=[kind.prefilled() for kind in kinds])
