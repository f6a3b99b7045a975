"""Experts chosen by sigmoid scores with a separate correction bias (DeepSeek-AI, 2024, arXiv:2412.19437, equations 12
to 16), and experts that all tokens share."""

from collections.abc import Mapping
from typing import Any

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Family, Layout, Source, Stretch
from cairn.engines.training.megatron.families.experts import Qwen3Moe

SHARED_EXPERTS: Mapping[str, Source] = {
    "mlp.shared_experts.linear_fc1.weight": Source(
        Layout.GATED, ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight")
    ),
    "mlp.shared_experts.linear_fc2.weight": Source(Layout.ROW, ("mlp.shared_experts.down_proj.weight",)),
}

_LAYER: Mapping[str, Source] = {
    **Qwen3Moe.layer,
    **SHARED_EXPERTS,
    "mlp.router.expert_bias": Source(Layout.REPLICATED, ("mlp.gate.e_score_correction_bias",)),
}


def sigmoid_router(experts_per_token: int) -> dict[str, Any]:
    """Return Megatron's options of a router whose bias affects the choice of experts but not their weights."""
    return {
        "moe_router_topk": experts_per_token,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # Megatron's own update comes before it is known that gradients are finite
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
    }


class Routed(Qwen3Moe):
    """Base of these families; each adds its attention."""

    layer = _LAYER

    def transformer(self, hf: Config) -> dict[str, Any]:
        grouped = hf.n_group > 1
        return {
            **Family.transformer(self, hf),
            **sigmoid_router(hf.num_experts_per_tok),
            "num_moe_experts": hf.n_routed_experts,
            "moe_layer_freq": self._layers_with_experts(hf),
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_shared_expert_intermediate_size": hf.n_shared_experts * hf.moe_intermediate_size,
            "moe_router_num_groups": hf.n_group if grouped else None,
            "moe_router_group_topk": hf.topk_group if grouped else None,
            "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        }

    def problems(self, hf: Config) -> list[str]:
        messages = Family.problems(self, hf)
        if not hf.norm_topk_prob:
            messages.append(
                "the weights of a token's experts do not add up (norm_topk_prob is false), as Megatron's do"
            )
        if hf.n_group > 1 and hf.num_experts_per_tok // hf.topk_group != 2:
            messages.append(
                f"it judges a group of experts by the best two, and Megatron by the best num_experts_per_tok // "
                f"topk_group = {hf.num_experts_per_tok // hf.topk_group}"
            )
        return messages

    def _layers_with_experts(self, hf: Config) -> list[int]:
        """Return 1 for every layer with experts and 0 for every dense one."""
        return [int(layer >= hf.first_k_dense_replace) for layer in range(hf.num_hidden_layers)]


class Glm4Moe(Routed):
    """GLM-4.5, GLM-4.6, GLM-4.7 and GLM-4.5-Air: a rotary embedding of a part of the head."""

    model_type = "glm4_moe"

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {**super().transformer(hf), "add_qkv_bias": hf.attention_bias, "qk_layernorm": hf.use_qk_norm}

    def model(self, hf: Config) -> dict[str, Any]:
        return {**super().model(hf), "rotary_percent": hf.rope_parameters.get("partial_rotary_factor", 1.0)}


_MINIMAX_LAYER: Mapping[str, Source] = {
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
    """Queries and keys normalised over all heads, and a rotary embedding of a part of the head."""

    model_type = "minimax_m2"
    layer = _MINIMAX_LAYER
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
