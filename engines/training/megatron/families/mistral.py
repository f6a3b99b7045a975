"""Mistral."""

from transformers import PretrainedConfig

from cairn.engines.training.megatron.families.base import Family


class Mistral(Family):
    model_type = "mistral"

    def problems(self, hf: PretrainedConfig) -> list[str]:
        sliding = hf.sliding_window is not None and hf.sliding_window < hf.max_position_embeddings
        return [*super().problems(hf), *(["it uses a sliding window"] if sliding else [])]
