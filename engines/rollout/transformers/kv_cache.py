"""Cache of the layers for the running samples: one slot for each sample, filled from position 0 at its own pace.

A slot's content and the arithmetic on it do not depend on the other slots. What comes after a slot's length is stale
but finite, and masked, so it adds exact zeros. With lengths cut at multiples of `ALIGNMENT`, the attention kernels add
them in the same order wherever the cut is.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

# What the layers of a model store of a sample's tokens, by kind of layer: how it is read from a prefilled prompt, and
# how the model's forward pass sees it when each slot takes one new token.
#
# | kind of layer | stores |
# |---|---|
# | full or sliding attention | keys and values of every position |
# | sparse attention | the same, and the indexer's keys |
# | compressed attention (DeepSeek V4) | keys, and what is compressed into entries of several positions |
# | linear attention (gated delta networks) | a state: the convolution's last inputs, and the recurrent one |
#
# Where every position is stored, a slot still holds what its sample began with, and padding on the right never enters
# it. A state summarizes all tokens before it and cannot be taken back, so prompts for it are prefilled without padding.


@dataclass(frozen=True)
class Slots:
    """The slots of a step, as its layers see them."""

    rows: int
    """Number of the first slots, which take a token each."""
    length: int
    """Number of positions to attend to."""
    offsets: dict[int, torch.Tensor]
    """For each number of heads, [rows * heads]: where the new positions are in a store that is viewed as [slots * heads
    * capacity, size]."""


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

    def get_max_length(self) -> int:
        return self._stores[0].shape[2]


class _IndexedStep(_AttentionStep):
    """Keys and values of slots, and the indexer's keys, which have one head."""

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the new keys [B, 1, size]; return [B, length, size]."""
        return self._extend(2, indexer_key_states.unsqueeze(1)).squeeze(1)


class _CompressedPrompt(DynamicLayer):
    """The library's part of the cache of a layer with compressed attention, and the compressors' inputs at every
    position.

    The library stores compressed entries instead, which a prompt's padding would enter.
    """

    def __init__(self, rate: int) -> None:
        super().__init__()
        self._rate = rate
        self.inputs: list[torch.Tensor] = []
        """[P, S, size] of values and weights of the compressor, then of the indexer's."""

    def store_compression_weights(
        self, name: str, values: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        self.inputs += [values, weights]
        return _whole_entries(self._rate, values, weights)

    def update_overlap_state(self, *args: Any) -> tuple[None, None]:
        return None, None

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        return compressed


class _CompressedStep(_AttentionStep):
    """Keys of slots, and the compressors' inputs, all of which are compressed anew in each step: slots are at different
    places of an entry."""

    def __init__(self, rate: int, stores: Sequence[torch.Tensor], heads: Sequence[int | None], slots: Slots) -> None:
        super().__init__(stores, heads, slots)
        self._rate = rate

    def update(self, key_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys [B, 1, 1, size], which are also values; return [B, 1, length, size] twice."""
        keys = self._extend(0, key_states)
        return keys, keys

    def store_compression_weights(
        self, name: str, values: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Write the new inputs [B, 1, size]; return those of all whole entries [B, positions, size], and the position
        of the first."""
        first = 1 if name == "compressor" else 3
        extended = (
            self._extend(first + part, new.unsqueeze(1)).squeeze(1) for part, new in enumerate((values, weights))
        )
        return _whole_entries(self._rate, *extended)

    def update_overlap_state(self, *args: Any) -> tuple[None, None]:
        return None, None

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        return compressed


def _whole_entries(rate: int, values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    whole = values.shape[1] // rate * rate
    return values[:, :whole], weights[:, :whole], 0


class _LinearStep(LinearAttentionCacheLayerMixin):
    """The states of slots, which the layer replaces."""

    def __init__(self, stores: Sequence[torch.Tensor], heads: Sequence[int | None], slots: Slots) -> None:
        super().__init__()
        self.conv_states[0], self.recurrent_states[0] = (store[: slots.rows] for store in stores)
        self.has_previous_state[0] = True  # before the first token it is zeros

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("a step of one token replaces the convolution's inputs in place")

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return cast(torch.Tensor, self.recurrent_states[0]).copy_(recurrent_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the stores exist before the first step")


@dataclass(frozen=True)
class LayerKind:
    """Common properties of the layers of one kind."""

    prefilled: Callable[[], Any]
    """Function that returns the library's cache of such a layer, for prompts."""
    read: Callable[[Any], tuple[torch.Tensor, ...]]
    """Function that returns what a prefilled layer stores: each [P, heads, S, size] with every position, or [P, …] for
    a state."""
    of_positions: bool
    """Whether the layer stores every position, rather than states."""
    step: Callable[
        [Sequence[torch.Tensor], Sequence[int | None], Slots], CacheLayerMixin | LinearAttentionCacheLayerMixin
    ]
    """Function that returns what the forward pass sees in a step, from the layer's stores, their heads, and the
    slots."""


def _keys_and_values(layer: DynamicLayer) -> tuple[torch.Tensor, ...]:
    """Return keys and values; nothing where the layer attends to those of another layer."""
    return () if layer.keys is None or layer.values is None else (layer.keys, layer.values)


def _with_indexer(layer: DynamicIndexedLayer) -> tuple[torch.Tensor, ...]:
    """Return keys and values, and the indexer's keys. Layers that use the selection of another layer have no
    indexer."""
    keys = layer.indexer_keys
    return _keys_and_values(layer) + (() if keys is None else (keys.unsqueeze(1),))


def _with_inputs(layer: Any) -> tuple[torch.Tensor, ...]:
    """Return keys, and what is compressed."""
    return layer.keys, *(states.unsqueeze(1) for states in layer.inputs)


def _states(layer: LinearAttentionLayer) -> tuple[torch.Tensor, ...]:
    """Return both states; nothing where the model does not fill such a cache."""
    convolution, recurrent = layer.conv_states[0], layer.recurrent_states[0]
    return () if convolution is None or recurrent is None else (convolution, recurrent)


_ATTENTION = LayerKind(DynamicLayer, _keys_and_values, True, _AttentionStep)
KINDS = {
    "full_attention": _ATTENTION,
    "sliding_attention": _ATTENTION,
    "indexed_attention": LayerKind(DynamicIndexedLayer, _with_indexer, True, _IndexedStep),
    "linear_attention": LayerKind(LinearAttentionLayer, _states, False, _LinearStep),
}
"""Kinds of layers, by the names of `config.layer_types`."""
COMPRESSED = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
"""Further kinds, which depend on the config."""


def kinds_of(config: PretrainedConfig, layer_types: Sequence[str]) -> list[LayerKind]:
    """Return the kinds of a model's layers."""
    rates = getattr(config, "compress_rates", None) or {}
    compressed = {
        name: LayerKind(partial(_CompressedPrompt, rate), _with_inputs, True, partial(_CompressedStep, rate))
        for name, rate in rates.items()
    }
    return [{**KINDS, **compressed}[name] for name in layer_types]


def prompt_cache(kinds: Sequence[LayerKind]) -> Cache:
    """Return an empty cache of the library for a model with such layers, which stores all positions of sliding ones
    too."""
    return Cache(layers=[kind.prefilled() for kind in kinds])


ALIGNMENT = 16
"""Divisor of all lengths that kernels see: the float32 lanes of the widest vector unit, AVX-512."""


def round_up(length: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-length // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Layer:
    """A layer of the model."""

    kind: LayerKind
    heads: tuple[int | None, ...]
    """Number of heads of each of its stores; None for a state, which has no positions."""


class KVCache:
    """Slots 0, 1, … for the prompts and responses of samples.

    Args:
        example: a cache that the model has filled; provides shapes, dtypes and device.
        kinds: kinds of the model's layers.
    """

    def __init__(self, example: Cache, kinds: Sequence[LayerKind]) -> None:
        cached = [kind.read(layer) for kind, layer in zip(kinds, example.layers, strict=True)]
        self.layers = [
            Layer(kind, tuple(states.shape[1] if kind.of_positions else None for states in layer))
            for kind, layer in zip(kinds, cached, strict=True)
        ]
        """Layers in the order of `stores`."""
        self.stores = [
            states[:0, :, :0] if kind.of_positions else states[:0]
            for kind, layer in zip(kinds, cached, strict=True)
            for states in layer
        ]
        """Stores of the first layer, of the second, …: each [slots, heads, capacity, size], or [slots, …] for a
        state."""
        self.capacity = 0
        """Positions in a slot."""

    @property
    def retains_prefixes(self) -> bool:
        """Whether a slot still holds, later on, what its sample began with."""
        return all(heads is not None for layer in self.layers for heads in layer.heads)

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for `num_slots` slots and `length` positions. The content of slots stays. Positions at least
        double."""
        slots = max(num_slots, self.stores[0].shape[0])
        if length > self.capacity:
            self.capacity = max(round_up(length), 2 * self.capacity)
        self.stores = [
            store if store.shape == shape else F.pad(store, _growth(store.shape, shape))
            for store, shape in zip(self.stores, self.shapes(slots, self.capacity), strict=True)
        ]

    def shapes(self, num_slots: int, capacity: int) -> list[tuple[int, ...]]:
        """Return the shapes of the stores with this many slots and positions."""
        return [
            (num_slots, store.shape[1], capacity, store.shape[3]) if grows else (num_slots, *store.shape[1:])
            for store, grows in self._stores()
        ]

    def insert(self, prompts: Cache, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy the prompt `sources[i]` of a prefilled batch into the slot `slots[i]`, from position 0."""
        cached = [
            states
            for layer, prefilled in zip(self.layers, prompts.layers, strict=True)
            for states in layer.kind.read(prefilled)
        ]
        for (store, grows), states in zip(self._stores(), cached, strict=True):
            part = store[:, :, : states.shape[2]] if grows else store
            part.index_copy_(0, slots, states.index_select(0, sources))

    def clear(self, slots: torch.Tensor) -> None:
        """Clear the slots."""
        for store in self.stores:
            store[slots] = 0

    def move(self, sources: torch.Tensor, slots: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of the slot `sources[i]`, and its states, to the slot `slots[i]`."""
        for store, grows in self._stores():
            part = store[:, :, :length] if grows else store
            part.index_copy_(0, slots, part.index_select(0, sources))

    def _stores(self) -> Iterator[tuple[torch.Tensor, bool]]:
        """Return each store, and whether it has positions."""
        heads = [heads for layer in self.layers for heads in layer.heads]
        return ((store, of is not None) for store, of in zip(self.stores, heads, strict=True))


class StepCache(Cache):
    """The model's view of a `KVCache` in a forward pass where each of the first slots takes one new token.

    Args:
        stores: stores as in `KVCache.stores`.
        layers: layers as in `KVCache.layers`.
        positions: [B], where the new tokens of the slots 0 … B - 1 go.
        length: number of positions to attend to.
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
    """Return the padding in the format of `F.pad`: the last dimension first."""
    return [
        places for size, other in zip(reversed(shape), reversed(larger), strict=True) for places in (0, other - size)
    ]


# Attention over the slots of a `KVCache`, as an attention function of transformers.
#
# The library's own SDPA function copies keys and values once per query head as soon as it gets a mask. Here grouped
# queries read them in place. Without a GPU, attention runs over segments of rows of different lengths
# (`cairn.engines.rollout.transformers.decoding`).


SLOT_ATTENTION = "cairn_slots"
"""Name of this function in transformers, for `model.set_attn_implementation`."""


_current = threading.local()


@contextmanager
def segmented(segments: torch.Tensor) -> Iterator[None]:
    """Have steps of this thread run over rows in these segments [K, 2]."""
    _current.segments = segments
    try:
        yield
    finally:
        del _current.segments


@torch.jit.script_if_tracing
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    segments: torch.Tensor,
    scale: float | None,
    grouped: bool,
) -> torch.Tensor:
    """Return `F.scaled_dot_product_attention`, with each segment over as many positions as it needs."""
    outputs: list[torch.Tensor] = []
    begin = 0
    for i in range(segments.shape[0]):
        end, length = int(segments[i, 0]), int(segments[i, 1])
        outputs.append(
            F.scaled_dot_product_attention(
                query[begin:end],
                key[begin:end, :, :length],
                value[begin:end, :, :length],
                attn_mask=mask[begin:end, :, :, :length],
                scale=scale,
                enable_gqa=grouped,
            )
        )
        begin = end
    return torch.cat(outputs)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with queries [B, H, S, D] to keys and values [B, G, L, D] under a mask [B, 1, S, L] to be added to scores.

    Without a mask, for prompts, this is the library's own function.

    Returns:
        [B, S, H, D], and no attention weights.
    """
    if attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **kwargs)
    group_size = int(getattr(module, "num_key_value_groups", 1))
    if group_size > 1 and query.is_cuda:
        # CUDA's fused kernels accept a mask or grouped heads, not both: a group's heads become queries of one head.
        grouped = query.unflatten(1, (-1, group_size)).flatten(2, 3)
        mask = attention_mask.unsqueeze(2).expand(-1, -1, group_size, -1, -1).flatten(2, 3)
        mask = mask.expand(-1, grouped.shape[1], -1, -1)
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        output = output.unflatten(2, (group_size, -1)).flatten(1, 2)
    else:
        segments: torch.Tensor | None = getattr(_current, "segments", None)
        if segments is None:  # a prompt, under the mask of a window
            segments = torch.tensor([(query.shape[0], key.shape[2])])
        output = _attend(query, key, value, attention_mask, segments, scaling, group_size > 1)
    return output.transpose(1, 2), None


COMPRESSED_ATTENTION = "cairn_compressed"
"""Name of this function in transformers."""


def compressed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the library's own attention of DeepSeek V4 to keys, and to the entries that follow them.

    In a step of one token, the library has layers of `heavily_compressed_attention` see all entries. Here a slot's
    token sees those that are complete at its position.
    """
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward  # few models need it

    if query.shape[2] == 1 and module.layer_type == "heavily_compressed_attention":
        rate = module.config.compress_rates[module.layer_type]
        entries = key.shape[2] // (rate + 1)  # of L keys and L // rate entries
        of_keys = attention_mask[..., : key.shape[2] - entries]
        places = torch.arange(of_keys.shape[3], device=key.device)
        position = torch.where(of_keys == 0, places, -1).amax(3, keepdim=True)
        incomplete = torch.arange(entries, device=key.device) >= (position + 1) // rate
        of_entries = torch.zeros_like(incomplete, dtype=query.dtype).masked_fill_(incomplete, float("-inf"))
        attention_mask = torch.cat([of_keys, of_entries], 3)
    output: tuple[torch.Tensor, torch.Tensor | None] = eager_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    return output


AttentionInterface.register(COMPRESSED_ATTENTION, compressed_attention)
AttentionMaskInterface.register(COMPRESSED_ATTENTION, eager_mask)
AttentionInterface.register(SLOT_ATTENTION, slot_attention)
AttentionMaskInterface.register(SLOT_ATTENTION, sdpa_mask)
