"""gpt-oss: a learnt softmax offset in every head, a sliding window in every other layer, YaRN, biases, and an expert's
weights in tensors of all experts, transposed."""

from collections.abc import Mapping, Sequence
from typing import Any

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Family, Layout, Source, Stretch
from cairn.engines.training.megatron.families.experts import Qwen3Moe, expert_parameter

_LIMIT = 7.0
"""Clamp value of an expert's two inner projections, fixed in the model's code. Also fixed there are the 1.702 of
quick_gelu and the 1 that is added to the second projection."""


def _heads(config: Any) -> Sequence[Stretch]:
    return [Stretch(0, config.num_attention_heads, config.num_attention_heads, 1)]


_LAYER: Mapping[str, Source] = {
    **Qwen3Moe.layer,
    "self_attention.core_attention.softmax_offset": Source(Layout.HEADS, ("self_attn.sinks",), _heads),
    "self_attention.linear_proj.bias": Source(Layout.REPLICATED, ("self_attn.o_proj.bias",)),
    "mlp.router.weight": Source(Layout.REPLICATED, ("mlp.router.weight",)),
    "mlp.router.bias": Source(Layout.REPLICATED, ("mlp.router.bias",)),
}
_EXPERT = {
    "fc1.weight": (Layout.EXPERT_IN, "gate_up_proj"),
    "fc1.bias": (Layout.EXPERT_IN, "gate_up_proj_bias"),
    "fc2.weight": (Layout.EXPERT_OUT, "down_proj"),
    "fc2.bias": (Layout.EXPERT_BIAS, "down_proj_bias"),
}


class GptOss(Family):
    model_type = "gpt_oss"
    layer = _LAYER

    def transformer(self, hf: Config) -> dict[str, Any]:
        rope = hf.rope_parameters
        return {
            **super().transformer(hf),
            "add_bias_linear": True,
            "activation_func": "quick_gelu",
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": _LIMIT,
            "softmax_type": "learnable",
            "window_size": (hf.sliding_window - 1, 0),
            "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in hf.layer_types],
            "num_moe_experts": hf.num_local_experts,
            "moe_layer_freq": 1,
            "moe_ffn_hidden_size": hf.intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "yarn_rotary_scaling_factor": rope["factor"],
            "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
            "yarn_beta_fast": rope["beta_fast"],
            "yarn_beta_slow": rope["beta_slow"],
            "yarn_mscale": None,
            "yarn_mscale_all_dim": None,
            "yarn_correction_range_round_to_int": rope.get("truncate", True),
        }

    def model(self, hf: Config) -> dict[str, Any]:
        return {**super().model(hf), "position_embedding_type": "yarn"}

    def problems(self, hf: Config) -> list[str]:
        messages = super().problems(hf)
        if not hf.attention_bias:
            messages.append("its attention has no biases")
        if getattr(hf, "quantization_config", None):
            messages.append("its experts are quantised: save the model in bfloat16 first, as the torch engine does")
        return messages

    def _layer_parameter(self, name: str) -> Source:
        of_expert = expert_parameter(name)
        if of_expert is None:
            return super()._layer_parameter(name)
        layout, tensor = _EXPERT[of_expert[1]]
        return Source(layout, (f"mlp.experts.{tensor}",), expert=of_expert[0])

    def _rope_types(self) -> Sequence[str]:
        return ("yarn",)
