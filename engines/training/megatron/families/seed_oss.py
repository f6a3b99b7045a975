"""Seed-OSS."""

from typing import Any

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Family


class SeedOss(Family):
    model_type = "seed_oss"

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {**super().transformer(hf), "add_qkv_bias": hf.attention_bias}

    def problems(self, hf: Config) -> list[str]:
        biases = hf.attention_out_bias or hf.mlp_bias
        return [*super().problems(hf), *(["its output projections or feed-forward part have biases"] if biases else [])]
