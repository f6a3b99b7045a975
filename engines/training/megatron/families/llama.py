"""Llama 3."""

from collections.abc import Sequence
from typing import Any

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Family

_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of Llama 3.1's rotary scaling that are built into Megatron."""


class Llama(Family):
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
        if rope.get("rope_type") == "llama3" and any(rope.get(name) != value for name, value in _FIXED.items()):
            differing.append(f"its rotary scaling differs from Llama 3.1's, {_FIXED}")
        return [*super().problems(hf), *differing]

    def _rope_types(self) -> Sequence[str]:
        return ("default", "llama3")
