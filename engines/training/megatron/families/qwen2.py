"""Qwen2 and Qwen2.5."""

from typing import Any

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Family


class Qwen2(Family):
    model_type = "qwen2"

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {**super().transformer(hf), "add_qkv_bias": True}

    def problems(self, hf: Config) -> list[str]:
        sliding = ["it uses a sliding window"] if hf.use_sliding_window else []
        return [*super().problems(hf), *sliding]
