"""Dense families."""

from collections.abc import Mapping, Sequence
from typing import Any

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Family, Layout, Source

_LLAMA_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of Llama 3.1's rotary scaling that are built into Megatron."""


class Llama(Family):
    """Llama 3."""

    model_type = "llama"

    def model(self, hf: Config) -> dict[str, Any]:
        rope = hf.rope_parameters
        scaled = {}
        if rope.get("rope_type") == "llama3":
            scaled = {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        return {**super().model(hf), **scaled}

    def problems(self, hf: Config) -> list[str]:
        differing = []
        if hf.attention_bias or hf.mlp_bias:
            differing.append("its attention or feed-forward part has biases")
        rope = hf.rope_parameters
        if rope.get("rope_type") == "llama3" and any(rope.get(name) != value for name, value in _LLAMA_SCALING.items()):
            differing.append(f"its rotary scaling differs from Llama 3.1's, {_LLAMA_SCALING}")
        return [*super().problems(hf), *differing]

    def _rope_types(self) -> Sequence[str]:
        return ("default", "llama3")


class Mistral(Family):
    model_type = "mistral"

    def transformer(self, hf: Config) -> dict[str, Any]:
        window = {} if hf.sliding_window is None else {"window_size": (hf.sliding_window - 1, 0)}
        return {**super().transformer(hf), **window}


class Qwen2(Family):
    """Qwen2 and Qwen2.5."""

    model_type = "qwen2"

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {**super().transformer(hf), "add_qkv_bias": True}

    def problems(self, hf: Config) -> list[str]:
        sliding = ["it uses a sliding window"] if hf.use_sliding_window else []
        return [*super().problems(hf), *sliding]


class Qwen3(Family):
    model_type = "qwen3"

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {**super().transformer(hf), "qk_layernorm": True}

    def problems(self, hf: Config) -> list[str]:
        differing = ["it uses a sliding window"] if hf.use_sliding_window else []
        if hf.attention_bias:
            differing.append("its attention has biases")
        return [*super().problems(hf), *differing]


class SeedOss(Family):
    model_type = "seed_oss"

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {**super().transformer(hf), "add_qkv_bias": hf.attention_bias}

    def problems(self, hf: Config) -> list[str]:
        biases = hf.attention_out_bias or hf.mlp_bias
        return [*super().problems(hf), *(["its output projections or feed-forward part have biases"] if biases else [])]


_GLM_LAYER: Mapping[str, Source] = {
    **Family.layer,
    "self_attn_bda.norm.weight": Source(Layout.REPLICATED, ("post_self_attn_layernorm.weight",)),
    "mlp_bda.norm.weight": Source(Layout.REPLICATED, ("post_mlp_layernorm.weight",)),
    "mlp.linear_fc1.weight": Source(Layout.GATED, ("mlp.gate_up_proj.weight",)),
}


class Glm4(Family):
    """GLM-4: norms before and after each part of a layer, and a rotary embedding of half the head, interleaved."""

    model_type = "glm4"
    post_norms = True
    layer = _GLM_LAYER

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {**super().transformer(hf), "add_qkv_bias": bool(hf.attention_bias), "rotary_interleaved": True}

    def model(self, hf: Config) -> dict[str, Any]:
        return {**super().model(hf), "rotary_percent": hf.rope_parameters["partial_rotary_factor"]}
