"""Qwen1.5-MoE and Qwen2-MoE: biases in attention, and a shared expert behind a gate as well as the routed experts."""

from collections.abc import Mapping
from typing import Any

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Family, Layout, Source
from cairn.engines.training.megatron.families.qwen3_moe import Qwen3Moe

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


_LAYER: Mapping[str, Source] = {**Qwen3Moe.layer, **GATED_EXPERT}


class Qwen2Moe(Qwen3Moe):
    model_type = "qwen2_moe"
    layer = _LAYER

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {
            **super().transformer(hf),
            **gated_expert(hf),
            "add_qkv_bias": hf.qkv_bias,
            "qk_layernorm": False,
        }

    def problems(self, hf: Config) -> list[str]:
        return [*Family.problems(self, hf), *(["it uses a sliding window"] if hf.use_sliding_window else [])]
