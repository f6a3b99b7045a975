"""GLM-4, dense: norms before and after each part of a layer, and a rotary embedding of half the head, interleaved."""

from collections.abc import Mapping
from typing import Any

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Family, Layout, Source

_GLM: Mapping[str, Source] = {
    **Family.layer,
    "self_attn_bda.norm.weight": Source(Layout.REPLICATED, ("post_self_attn_layernorm.weight",)),
    "mlp_bda.norm.weight": Source(Layout.REPLICATED, ("post_mlp_layernorm.weight",)),
    "mlp.linear_fc1.weight": Source(Layout.GATED, ("mlp.gate_up_proj.weight",)),
}


class Glm4(Family):
    model_type = "glm4"
    post_norms = True
    layer = _GLM

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {**super().transformer(hf), "add_qkv_bias": bool(hf.attention_bias), "rotary_interleaved": True}

    def model(self, hf: Config) -> dict[str, Any]:
        return {**super().model(hf), "rotary_percent": hf.rope_parameters["partial_rotary_factor"]}
