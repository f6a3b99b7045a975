"""GLM-5 and DeepSeek V3.2: latent attention of which an indexer chooses the keys (DeepSeek-AI, 2025, arXiv:2512.02556,
section 2.1)."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

from cairn.engines.training.megatron.families.base import Layout, Source
from cairn.engines.training.megatron.families.deepseek_v3 import DeepseekV3, Glm4MoeLite

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

_LAYER: Mapping[str, Source] = {
    **{name: source for name, source in DeepseekV3.layer.items() if name not in _NORMS.values()},
    **{name: DeepseekV3.layer[merged] for name, merged in _NORMS.items()},
    **_INDEXER,
}


class GlmMoeDsa(Glm4MoeLite):
    model_type = "glm_moe_dsa"
    layer = _LAYER

    def transformer(self, hf: PretrainedConfig) -> dict[str, Any]:
        every, first = _schedule(_kinds(hf)) or (1, 0)
        return {
            **super().transformer(hf),
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": hf.index_n_heads,
            "dsa_indexer_head_dim": hf.index_head_dim,
            "dsa_indexer_topk": hf.index_topk,
            "dsa_indexer_topk_freq": every,
            "dsa_indexer_skip_topk_offset": first,
            "dsa_indexer_rope_interleaved": True,
            "dsa_indexer_rotate_activation": False,  # an orthogonal transform of both sides of a product
            "dsa_indexer_k_norm_epsilon": 1e-6,
        }

    def problems(self, hf: PretrainedConfig) -> list[str]:
        messages = super().problems(hf)
        if _schedule(_kinds(hf)) is None:
            messages.append("the layers with an indexer (indexer_types) do not follow each other at one distance")
        return messages

    def untrained(self, hf: PretrainedConfig) -> frozenset[str]:
        tensors = [source.names[0] for source in _INDEXER.values()]
        own = [layer for layer, kind in enumerate(_kinds(hf)) if kind == "full"]
        return frozenset(f"model.layers.{layer}.{tensor}" for layer in own for tensor in tensors)


class DeepseekV32(GlmMoeDsa):
    model_type = "deepseek_v32"

    def transformer(self, hf: PretrainedConfig) -> dict[str, Any]:
        return {**super().transformer(hf), "dsa_indexer_rope_interleaved": False}


def _kinds(hf: PretrainedConfig) -> Sequence[str]:
    """Return "full" for each layer with an indexer of its own; DeepSeek's all have one."""
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
