"""Mistral."""

from typing import Any

from transformers import PretrainedConfig

from cairn.engines.training.megatron.families.base import Family


class Mistral(Family):
    model_type = "mistral"

    def transformer(self, hf: PretrainedConfig) -> dict[str, Any]:
        window = {} if hf.sliding_window is None else {"window_size": (hf.sliding_window - 1, 0)}
        return {**super().transformer(hf), **window}
