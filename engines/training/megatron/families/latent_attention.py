"""Multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434, section 2.1), with or without a latent of the
queries, and with or without an indexer that chooses the keys (DeepSeek-AI, 2025, arXiv:2512.02556, section 2.1)."""

from collections.abc import Mapping, Sequence
from typing import Any

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Layout, Source, Stretch
from cairn.engines.training.megatron.families.routed import Routed


def _queries(config: Any) -> Sequence[Stretch]:
    heads, width = config.num_attention_heads, config.qk_head_dim + config.qk_pos_emb_head_dim
    return [Stretch(0, heads * width, heads, width)]


def _keys_and_values(config: Any) -> Sequence[Stretch]:
    heads, width = config.num_attention_heads, config.qk_head_dim + config.v_head_dim
    return [Stretch(0, heads * width, heads, width)]


_LAYER: Mapping[str, Source] = {
    **{
        name: source
        for name, source in Routed.layer.items()
        if not name.startswith(("self_attention.linear_qkv.", "self_attention.q_", "self_attention.k_"))
    },
    "input_layernorm.weight": Source(Layout.REPLICATED, ("input_layernorm.weight",)),
    "self_attention.linear_q_proj.weight": Source(Layout.HEADS, ("self_attn.q_proj.weight",), _queries),
    "self_attention.linear_q_down_proj.weight": Source(Layout.REPLICATED, ("self_attn.q_a_proj.weight",)),
    "self_attention.linear_q_up_proj.layer_norm_weight": Source(Layout.REPLICATED, ("self_attn.q_a_layernorm.weight",)),
    "self_attention.linear_q_up_proj.weight": Source(Layout.HEADS, ("self_attn.q_b_proj.weight",), _queries),
    "self_attention.linear_kv_down_proj.weight": Source(Layout.REPLICATED, ("self_attn.kv_a_proj_with_mqa.weight",)),
    "self_attention.linear_kv_up_proj.layer_norm_weight": Source(
        Layout.REPLICATED, ("self_attn.kv_a_layernorm.weight",)
    ),
    "self_attention.linear_kv_up_proj.weight": Source(Layout.HEADS, ("self_attn.kv_b_proj.weight",), _keys_and_values),
}


class DeepseekV3(Routed):
    """DeepSeek V3, V3.1 and R1, Kimi K2 and Moonlight."""

    model_type = "deepseek_v3"
    layer = _LAYER
    latent_epsilon = 1e-6

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {
            **super().transformer(hf),
            "multi_latent_attention": True,
            "num_query_groups": hf.num_attention_heads,
            "qk_layernorm": True,
            "q_lora_rank": hf.q_lora_rank,
            "kv_lora_rank": hf.kv_lora_rank,
            "qk_head_dim": hf.qk_nope_head_dim,
            "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
            "v_head_dim": hf.v_head_dim,
            "rotary_base": hf.rope_parameters["rope_theta"],
            **self._scaling(hf.rope_parameters),
        }

    def problems(self, hf: Config) -> list[str]:
        messages, rope = super().problems(hf), hf.rope_parameters
        if hf.attention_bias:
            messages.append("its attention has biases")
        if not getattr(hf, "rope_interleave", True):
            messages.append("its rotary embedding does not take neighbours in pairs (rope_interleave is false)")
        if rope.get("attention_factor") is not None or not rope.get("truncate", True):
            messages.append("its YaRN has an attention_factor of its own, or bounds that are not rounded")
        if rope.get("mscale", 1) != 1 and not rope.get("mscale_all_dim"):
            messages.append("its YaRN has an mscale and no mscale_all_dim")
        return messages

    def _scaling(self, rope: dict[str, Any]) -> dict[str, Any]:
        """Return Megatron's options of the rotary embedding's scaling (Peng et al., YaRN, 2023, arXiv:2309.00071)."""
        if rope.get("rope_type", "default") == "default":
            return {"rope_type": "rope", "rotary_scaling_factor": 1.0}
        return {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta_fast": rope.get("beta_fast") or 32.0,
            "beta_slow": rope.get("beta_slow") or 1.0,
            "mscale": rope.get("mscale", 1.0),
            "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        }

    def _rope_types(self) -> Sequence[str]:
        return ("default", "yarn")


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash."""

    model_type = "glm4_moe_lite"

    def _layers_with_experts(self, hf: Config) -> list[int]:
        return [int(kind == "sparse") for kind in hf.mlp_layer_types]


_INDEXER: Mapping[str, Source] = {
    f"self_attention.core_attention.indexer.{name}": Source(Layout.REPLICATED, (f"self_attn.indexer.{tensor}",))
    for name, tensor in {
        "linear_wq_b.weight": "wq_b.weight",
        "linear_wk.weight": "wk.weight",
        "k_norm.weight": "k_norm.weight",
        "k_norm.bias": "k_norm.bias",
        "linear_weights_proj.weight": "weights_proj.weight",
    }.items()
}

_NORMS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""Norms that are modules of their own, since the indexer reads the normalised latent too."""

_SPARSE_LAYER: Mapping[str, Source] = {
    **{name: source for name, source in DeepseekV3.layer.items() if name not in _NORMS.values()},
    **{name: DeepseekV3.layer[merged] for name, merged in _NORMS.items()},
    **_INDEXER,
}


class DeepseekV32(DeepseekV3):
    """DeepSeek V3.2."""

    model_type = "deepseek_v32"
    layer = _SPARSE_LAYER
    rotates_neighbours = False
    """Whether the indexer's rotary embedding takes neighbours in pairs."""

    def transformer(self, hf: Config) -> dict[str, Any]:
        every, first = _schedule(_kinds(hf)) or (1, 0)
        return {
            **super().transformer(hf),
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": hf.index_n_heads,
            "dsa_indexer_head_dim": hf.index_head_dim,
            "dsa_indexer_topk": hf.index_topk,
            "dsa_indexer_topk_freq": every,
            "dsa_indexer_skip_topk_offset": first,
            "dsa_indexer_rope_interleaved": self.rotates_neighbours,
            "dsa_indexer_rotate_activation": False,  # an orthogonal transform of both sides of a product
            "dsa_indexer_k_norm_epsilon": 1e-6,
        }

    def problems(self, hf: Config) -> list[str]:
        messages = super().problems(hf)
        if _schedule(_kinds(hf)) is None:
            messages.append("the layers with an indexer (indexer_types) do not follow each other at one distance")
        return messages

    def untrained(self, hf: Config) -> frozenset[str]:
        tensors = [source.names[0] for source in _INDEXER.values()]
        own = [layer for layer, kind in enumerate(_kinds(hf)) if kind == "full"]
        return frozenset(f"model.layers.{layer}.{tensor}" for layer in own for tensor in tensors)


class GlmMoeDsa(DeepseekV32, Glm4MoeLite):
    """GLM-5."""

    model_type = "glm_moe_dsa"
    rotates_neighbours = True


def _kinds(hf: Config) -> Sequence[str]:
    """Return for every layer `full` if it has an indexer, else `shared`."""
    return getattr(hf, "indexer_types", None) or ["full"] * hf.num_hidden_layers


def _schedule(kinds: Sequence[str]) -> tuple[int, int] | None:
    """Return Megatron's distance between layers with an indexer, and the last of those before that all have one.

    Layers count from 1. None: the layers are not like that.
    """
    full = [kind == "full" for kind in kinds]
    for first in range(1, len(full) + 1):
        for every in range(1, len(full) + 1):
            if full == [max(layer - first, 0) % every == 0 for layer in range(1, len(full) + 1)]:
                return every, first
    return None
