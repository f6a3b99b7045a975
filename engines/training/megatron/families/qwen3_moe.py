"""Qwen3 with a mixture of experts in every layer, or in some of them."""

import re
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from cairn.engines.training.megatron.families.base import Layout, Source
from cairn.engines.training.megatron.families.qwen3 import Qwen3

_MOE: Mapping[str, Source] = {
    **Qwen3.layer,
    "pre_mlp_layernorm.weight": Source(Layout.REPLICATED, ("post_attention_layernorm.weight",)),
    "mlp.router.weight": Source(Layout.REPLICATED, ("mlp.gate.weight",)),
}


class Qwen3Moe(Qwen3):
    model_type = "qwen3_moe"
    layer = _MOE

    def transformer(self, hf: PretrainedConfig) -> dict[str, Any]:
        dense, step = set(getattr(hf, "mlp_only_layers", ())), getattr(hf, "decoder_sparse_step", 1)
        experts = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(hf.num_hidden_layers)]
        return {
            **super().transformer(hf),
            "num_moe_experts": hf.num_experts,
            "moe_layer_freq": experts,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
            # Softmax over the chosen experts' logits is softmax over all of them, normalised among the chosen.
            "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
        }

    def _layer_parameter(self, name: str) -> Source:
        # Experts one by one, as without a GPU, or all of them in one module, as in Transformer Engine's.
        match = re.fullmatch(
            r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc(\d)\.weight|linear_fc(\d)\.weight(\d+))", name
        )
        if match is None:
            return super()._layer_parameter(name)
        expert, layer = match[1] or match[4], match[2] or match[3]
        prefix = f"mlp.experts.{expert}"
        if layer == "1":
            return Source(Layout.GATED, (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"))
        return Source(Layout.ROW, (f"{prefix}.down_proj.weight",))
