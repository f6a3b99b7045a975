"""Qwen3, dense."""

from typing import Any

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Family


class Qwen3(Family):
    model_type = "qwen3"

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {**super().transformer(hf), "qk_layernorm": True}

    def problems(self, hf: Config) -> list[str]:
        differing = ["it uses a sliding window"] if hf.use_sliding_window else []
        if hf.attention_bias:
            differing.append("its attention has biases")
        return [*super().problems(hf), *differing]
