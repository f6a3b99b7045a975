"""Description of a family of models: its configuration and parameters in Megatron's terms.

The mapping is our own and not Megatron-Bridge's: see docs/engines/megatron.md for the reasons.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

from torch.nn.functional import silu
from transformers import PretrainedConfig


class Layout(Enum):
    """Composition of a Megatron parameter from Hugging Face tensors, and its split over the tensor-parallel ranks."""

    REPLICATED = "replicated"
    """A single tensor, whole on every rank."""
    COLUMN = "column"
    """A single tensor; each rank has some of its rows (columns of the transposed matrix)."""
    ROW = "row"
    """A single tensor; each rank has some of its columns."""
    GATED = "gated"
    """Gate and up projection, in two tensors or stacked in one: each rank has rows of the first, then of the second."""
    QKV = "qkv"
    """Query, key and value projection: for every key-value head its query heads' rows, then its key and value rows."""
    HEADS = "heads"
    """Rows of heads, one stretch after the other; each rank has some of the heads of every stretch."""
    EXPERT_IN = "expert in"
    """Gate and up projection of an expert, whose columns alternate in one tensor of all experts [experts, in, out].
    Each rank has some columns of the gate, as rows, then of the up projection. Their biases in [experts, out] are cut
    alike."""
    EXPERT_OUT = "expert out"
    """Down projection of an expert in one tensor of all experts [experts, in, out]. Each rank has some of its rows, as
    columns."""
    EXPERT_BIAS = "expert bias"
    """A row of one tensor of all experts, whole on every rank."""
    GROUPS = "groups"
    """Rows of heads as in HEADS, but with all rows of a head together; each rank has some of the heads."""


@dataclass(frozen=True)
class Stretch:
    """Rows of a Hugging Face tensor that belong to heads."""

    part: int
    """Index of the tensor in `Source.names`."""
    rows: int
    """Rows of the whole tensor."""
    heads: int
    height: int
    """Rows of one head."""
    first: int = 0
    """First row of the first head."""
    every: int | None = None
    """Rows from the start of one head to the start of the next; None where this is `height`."""


@dataclass(frozen=True)
class Source:
    """Origin of a Megatron parameter."""

    layout: Layout
    names: tuple[str, ...]
    """Names of the Hugging Face tensors."""
    stretches: Callable[[Any], Sequence[Stretch]] | None = None
    """Only for HEADS and GROUPS: the stretches of the parameter, from Megatron's TransformerConfig."""
    expert: int = 0
    """Only for EXPERT_IN, EXPERT_OUT and EXPERT_BIAS: index of the expert."""


_OUTSIDE = {
    "embedding.word_embeddings.weight": Source(Layout.COLUMN, ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": Source(Layout.REPLICATED, ("model.norm.weight",)),
    "output_layer.weight": Source(Layout.COLUMN, ("lm_head.weight",)),
}

_LAYER: Mapping[str, Source] = {
    "self_attention.linear_qkv.layer_norm_weight": Source(Layout.REPLICATED, ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": Source(Layout.QKV, tuple(f"self_attn.{part}_proj.weight" for part in "qkv")),
    "self_attention.linear_qkv.bias": Source(Layout.QKV, tuple(f"self_attn.{part}_proj.bias" for part in "qkv")),
    "self_attention.q_layernorm.weight": Source(Layout.REPLICATED, ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Source(Layout.REPLICATED, ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": Source(Layout.ROW, ("self_attn.o_proj.weight",)),
    "mlp.linear_fc1.layer_norm_weight": Source(Layout.REPLICATED, ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": Source(Layout.GATED, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": Source(Layout.ROW, ("mlp.down_proj.weight",)),
}


class Family:
    """A llama-like decoder; a subclass overrides what differs."""

    model_type: ClassVar[str]
    """Model type in config.json."""
    post_norms: ClassVar[bool] = False
    """Whether the outputs of attention and feed-forward part are normalised before they are added."""
    whole_norms: ClassVar[bool] = False
    """Whether queries and keys are normalised over all their heads together."""
    latent_epsilon: ClassVar[float | None] = None
    """Epsilon of the norms of latents in attention, where it differs from that of the other norms."""
    layer: ClassVar[Mapping[str, Source]] = _LAYER
    """Sources of a layer's parameters, except for experts; names on both sides without the layer's prefix."""

    def transformer(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return the fields of Megatron's TransformerConfig."""
        return {
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "ffn_hidden_size": getattr(hf, "intermediate_size", None) or hf.moe_intermediate_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
            "normalization": "RMSNorm",
            "layernorm_epsilon": hf.rms_norm_eps,
            "gated_linear_unit": True,
            "activation_func": silu,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "qk_layernorm": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "moe_token_dispatcher_type": "alltoall",
        }

    def model(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return the arguments of Megatron's GPTModel, except for the size of the vocabulary."""
        return {
            "share_embeddings_and_output_weights": bool(hf.tie_word_embeddings),
            "max_sequence_length": hf.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": hf.rope_parameters["rope_theta"],
            "rotary_percent": 1.0,
        }

    def problems(self, hf: PretrainedConfig) -> list[str]:
        """Return messages on what Megatron would compute differently."""
        messages = []
        if hf.hidden_act != "silu":
            messages.append(f"its activation is {hf.hidden_act}, not silu")
        if (kind := hf.rope_parameters.get("rope_type", "default")) not in self._rope_types():
            messages.append(f"its rotary embedding is of type {kind}")
        return messages

    def untrained(self, hf: PretrainedConfig) -> frozenset[str]:
        """Return the Hugging Face tensors that no gradient of the loss reaches."""
        return frozenset()

    def parameter(self, name: str) -> Source:
        """Return the source of a parameter, whose name counts layers and experts over the whole model.

        Raises:
            KeyError: the family has no such parameter.
        """
        if name in _OUTSIDE:
            return _OUTSIDE[name]
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if match is None:
            raise KeyError(name)
        source = self._layer_parameter(match[2])
        return replace(source, names=tuple(f"model.layers.{match[1]}.{part}" for part in source.names))

    def merged_tensors(self, layers: int) -> Iterator[tuple[str, ...]]:
        """Yield the names of Hugging Face tensors that are parts of one Megatron parameter, except for experts'.

        A model may lack some of these parameters.
        """
        for layer in range(layers):
            for name in self.layer:
                source = self.parameter(f"decoder.layers.{layer}.{name}")
                if len(source.names) > 1:
                    yield source.names

    def _layer_parameter(self, name: str) -> Source:
        """Return the source of a layer's parameter; names on both sides without the layer's prefix. Raises KeyError."""
        return self.layer[name]

    def _rope_types(self) -> Sequence[str]:
        return ("default",)
