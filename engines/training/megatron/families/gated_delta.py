"""Gated delta networks in most layers, with or without experts: Qwen3-Next and Qwen3.5."""

from collections.abc import Mapping, Sequence
from typing import Any

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Family, Layout, Source, Stretch
from cairn.engines.training.megatron.families.experts import GATED_EXPERT, Qwen3Moe, gated_expert

# Common to Qwen3-Next and Qwen3.5: gated delta networks in most layers and gated attention in the others, norms whose
# weights deviate from 1, and a rotary embedding of a part of the head.


def _gated_attention(config: Any) -> Sequence[Stretch]:
    """Return for every key-value head its query heads' rows, then their gates' rows, then its own key and value rows.

    In the query projection each gate follows its query head.
    """
    width, groups = config.kv_channels, config.num_query_groups
    heads = config.num_attention_heads // groups
    of_queries = {"part": 0, "rows": 2 * groups * heads * width, "heads": groups, "every": 2 * heads * width}
    return [
        *(Stretch(**of_queries, height=width, first=2 * head * width) for head in range(heads)),
        *(Stretch(**of_queries, height=width, first=(2 * head + 1) * width) for head in range(heads)),
        *(Stretch(part, groups * width, groups, width) for part in (1, 2)),
    ]


def _convolved(config: Any) -> Sequence[Stretch]:
    """Return the stretches of queries, keys and values of a gated delta network."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    width = config.linear_key_head_dim
    rows = 2 * keys * width + values * config.linear_value_head_dim
    return [
        Stretch(0, rows, keys, width),
        Stretch(0, rows, keys, width, first=keys * width),
        Stretch(0, rows, values, config.linear_value_head_dim, first=2 * keys * width),
    ]


def _value_heads(config: Any) -> Sequence[Stretch]:
    """Return a stretch with one number for every value head."""
    return [Stretch(0, config.linear_num_value_heads, config.linear_num_value_heads, 1)]


_GATED_LAYER: Mapping[str, Source] = {
    **Family.layer,
    "self_attention.linear_qkv.weight": Source(
        Layout.GROUPS, tuple(f"self_attn.{part}_proj.weight" for part in "qkv"), _gated_attention
    ),
    "self_attention.in_proj.layer_norm_weight": Source(Layout.REPLICATED, ("input_layernorm.weight",)),
    "self_attention.conv1d.weight": Source(Layout.HEADS, ("linear_attn.conv1d.weight",), _convolved),
    "self_attention.dt_bias": Source(Layout.HEADS, ("linear_attn.dt_bias",), _value_heads),
    "self_attention.A_log": Source(Layout.HEADS, ("linear_attn.A_log",), _value_heads),
    "self_attention.out_norm.weight": Source(Layout.REPLICATED, ("linear_attn.norm.weight",)),
    "self_attention.out_proj.weight": Source(Layout.ROW, ("linear_attn.out_proj.weight",)),
}


class GatedDelta(Family):
    """Base of these families; each adds how the input projection of its delta networks is stored."""

    layer = _GATED_LAYER

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {
            **super().transformer(hf),
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "linear_attention_freq": [int(kind == "linear_attention") for kind in hf.layer_types],
            "linear_conv_kernel_dim": hf.linear_conv_kernel_dim,
            "linear_key_head_dim": hf.linear_key_head_dim,
            "linear_value_head_dim": hf.linear_value_head_dim,
            "linear_num_key_heads": hf.linear_num_key_heads,
            "linear_num_value_heads": hf.linear_num_value_heads,
        }

    def model(self, hf: Config) -> dict[str, Any]:
        return {**super().model(hf), "rotary_percent": hf.rope_parameters["partial_rotary_factor"]}

    def problems(self, hf: Config) -> list[str]:
        biases = ["its attention has biases"] if hf.attention_bias else []
        return [*Family.problems(self, hf), *biases]


def _input_projection(config: Any) -> Sequence[Stretch]:
    """Return the stretches of queries, keys, values, their gates, beta and alpha, each of all heads.

    The first tensor holds, for every key head, the first four one below the other. The second tensor holds the last
    two. Values, gates, beta and alpha are those of the value heads that share the key head.
    """
    keys, width = config.linear_num_key_heads, config.linear_key_head_dim
    shared = config.linear_num_value_heads // keys
    values = shared * config.linear_value_head_dim
    first = {"part": 0, "rows": keys * (2 * width + 2 * values), "heads": keys, "every": 2 * width + 2 * values}
    second = {"part": 1, "rows": keys * 2 * shared, "heads": keys, "every": 2 * shared}
    return [
        Stretch(**first, height=width),
        Stretch(**first, height=width, first=width),
        Stretch(**first, height=values, first=2 * width),
        Stretch(**first, height=values, first=2 * width + values),
        Stretch(**second, height=shared),
        Stretch(**second, height=shared, first=shared),
    ]


_NEXT_LAYER: Mapping[str, Source] = {
    **Qwen3Moe.layer,
    **GatedDelta.layer,
    **GATED_EXPERT,
    "self_attention.in_proj.weight": Source(
        Layout.HEADS, ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"), _input_projection
    ),
}


class Qwen3Next(GatedDelta, Qwen3Moe):
    """Experts next to a gated expert that all tokens share."""

    model_type = "qwen3_next"
    layer = _NEXT_LAYER

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {**super().transformer(hf), **gated_expert(hf)}


# Qwen3.5: the input projection of a delta network is in four tensors.


def _separate_projection(config: Any) -> Sequence[Stretch]:
    """Return the stretches of queries, keys, values, their gates, beta and alpha, each of all heads."""
    heads, width = config.linear_num_value_heads, config.linear_value_head_dim
    return [
        *_convolved(config),
        Stretch(1, heads * width, heads, width),
        *(Stretch(part, heads, heads, 1) for part in (2, 3)),
    ]


_SEPARATE: Mapping[str, Source] = {
    "self_attention.in_proj.weight": Source(
        Layout.HEADS,
        tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
        _separate_projection,
    ),
}
_QWEN35_LAYER: Mapping[str, Source] = {**GatedDelta.layer, **_SEPARATE}
_QWEN35_MOE_LAYER: Mapping[str, Source] = {**Qwen3Next.layer, **_SEPARATE}


class Qwen35(GatedDelta):
    model_type = "qwen3_5_text"
    layer = _QWEN35_LAYER


class Qwen35Moe(Qwen3Next):
    model_type = "qwen3_5_moe_text"
    layer = _QWEN35_MOE_LAYER
