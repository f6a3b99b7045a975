"""Qwen3-Next: gated delta networks, and experts beside a gated one that all tokens share."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

from cairn.engines.training.megatron.families.base import Layout, Source, Stretch
from cairn.engines.training.megatron.families.gated_delta import GatedDelta
from cairn.engines.training.megatron.families.qwen2_moe import GATED_EXPERT, gated_expert
from cairn.engines.training.megatron.families.qwen3_moe import Qwen3Moe


def _input_projection(config: Any) -> Sequence[Stretch]:
    """Queries, keys, values, their gates, beta and alpha, each of all heads. One tensor has for every key head the
    first four below each other, of the value heads that share it, the other the last two."""
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


_LAYER: Mapping[str, Source] = {
    **Qwen3Moe.layer,
    **GatedDelta.layer,
    **GATED_EXPERT,
    "self_attention.in_proj.weight": Source(
        Layout.HEADS, ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"), _input_projection
    ),
}


class Qwen3Next(GatedDelta, Qwen3Moe):
    model_type = "qwen3_next"
    layer = _LAYER

    def transformer(self, hf: PretrainedConfig) -> dict[str, Any]:
        return {**super().transformer(hf), **gated_expert(hf)}
