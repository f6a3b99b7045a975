"""Mistral."""

from typing import Any

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Family


class Mistral(Family):
    model_type = "mistral"

    def transformer(self, hf: Config) -> dict[str, Any]:
        window = {} if hf.sliding_window is None else {"window_size": (hf.sliding_window - 1, 0)}
        return {**super().transformer(hf), **window}
