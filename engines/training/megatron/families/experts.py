"""Experts chosen by a softmax: Qwen3 and Qwen2 with experts."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Family, Layout, Source
from cairn.engines.training.megatron.families.dense import Qwen3

_MOE: Mapping[str, Source] = {
    **Qwen3.layer,
    "pre_mlp_layernorm.weight": Source(Layout.REPLICATED, ("post_attention_layernorm.weight",)),
    "mlp.router.weight": Source(Layout.REPLICATED, ("mlp.gate.weight",)),
}


def expert_parameter(name: str) -> tuple[int, str] | None:
    """Return an expert's index and the name of its parameter, such as "fc1.weight"; None for other parameters.

    Experts are separate modules, as without a GPU, or all in one module, as in Transformer Engine.
    """
    match = re.fullmatch(r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_(fc\d\.\w+)|linear_(fc\d\.[a-z]+)(\d+))", name)
    return None if match is None else (int(match[1] or match[4]), match[2] or match[3])


class Qwen3Moe(Qwen3):
    """Experts in every layer, or in some of them."""

    model_type = "qwen3_moe"
    layer = _MOE
    experts: ClassVar[str] = "mlp.experts"
    """Prefix of the experts' tensors."""
    projections: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's tensors, without their suffix."""

    def transformer(self, hf: Config) -> dict[str, Any]:
        dense, step = set(getattr(hf, "mlp_only_layers", ())), getattr(hf, "decoder_sparse_step", 1)
        experts = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(hf.num_hidden_layers)]
        return {
            **super().transformer(hf),
            "num_moe_experts": hf.num_experts,
            "moe_layer_freq": experts,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
            # A softmax over the chosen experts' logits is the softmax over all experts, normalised among the chosen.
            "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
        }

    def _layer_parameter(self, name: str) -> Source:
        of_expert = expert_parameter(name)
        if of_expert is None:
            return super()._layer_parameter(name)
        expert, part = of_expert
        gate, up, down = (f"{self.experts}.{expert}.{projection}.weight" for projection in self.projections)
        return Source(Layout.GATED, (gate, up)) if part == "fc1.weight" else Source(Layout.ROW, (down,))


GATED_EXPERT: Mapping[str, Source] = {
    "mlp.shared_experts.linear_fc1.weight": Source(
        Layout.GATED, ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight")
    ),
    "mlp.shared_experts.linear_fc2.weight": Source(Layout.ROW, ("mlp.shared_expert.down_proj.weight",)),
    "mlp.shared_experts.gate_weight": Source(Layout.REPLICATED, ("mlp.shared_expert_gate.weight",)),
}
"""Sources of a shared expert whose output a gate scales."""


def gated_expert(hf: Config) -> dict[str, Any]:
    """Return Megatron's options of this expert."""
    return {
        "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


_QWEN2_LAYER: Mapping[str, Source] = {**Qwen3Moe.layer, **GATED_EXPERT}


class Qwen2Moe(Qwen3Moe):
    """Qwen1.5-MoE and Qwen2-MoE: biases in attention, and a shared expert behind a gate beside the routed ones."""

    model_type = "qwen2_moe"
    layer = _QWEN2_LAYER

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {
            **super().transformer(hf),
            **gated_expert(hf),
            "add_qkv_bias": hf.qkv_bias,
            "qk_layernorm": False,
        }

    def problems(self, hf: Config) -> list[str]:
        return [*Family.problems(self, hf), *(["it uses a sliding window"] if hf.use_sliding_window else [])]
