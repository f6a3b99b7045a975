"""MiniMax-M2: queries and keys normalised over all heads, a rotary embedding of a part of the head, sigmoid routing."""

from collections.abc import Mapping
from typing import Any

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Family, Layout, Source, Stretch
from cairn.engines.training.megatron.families.qwen3_moe import Qwen3Moe
from cairn.engines.training.megatron.families.routed import sigmoid_router

_LAYER: Mapping[str, Source] = {
    **Qwen3Moe.layer,
    "mlp.router.weight": Source(Layout.REPLICATED, ("block_sparse_moe.gate.weight",)),
    "mlp.router.expert_bias": Source(Layout.REPLICATED, ("block_sparse_moe.e_score_correction_bias",)),
    "self_attention.q_layernorm.weight": Source(
        Layout.HEADS,
        ("self_attn.q_norm.weight",),
        lambda config: [
            Stretch(0, config.num_attention_heads * config.kv_channels, config.num_attention_heads, config.kv_channels)
        ],
    ),
    "self_attention.k_layernorm.weight": Source(
        Layout.HEADS,
        ("self_attn.k_norm.weight",),
        lambda config: [
            Stretch(0, config.num_query_groups * config.kv_channels, config.num_query_groups, config.kv_channels)
        ],
    ),
}


class MiniMaxM2(Qwen3Moe):
    model_type = "minimax_m2"
    layer = _LAYER
    whole_norms = True
    experts = "block_sparse_moe.experts"
    projections = ("w1", "w3", "w2")

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {
            **Family.transformer(self, hf),
            **sigmoid_router(hf.num_experts_per_tok),
            "num_moe_experts": hf.num_local_experts,
            "moe_layer_freq": 1,
            "moe_ffn_hidden_size": hf.intermediate_size,
        }

    def model(self, hf: Config) -> dict[str, Any]:
        return {**super().model(hf), "rotary_percent": hf.rope_parameters.get("partial_rotary_factor", 1.0)}

    def problems(self, hf: Config) -> list[str]:
        return Family.problems(self, hf)
