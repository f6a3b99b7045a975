"""GLM-4.5, GLM-4.6, GLM-4.7 and GLM-4.5-Air: experts like DeepSeek V3's, a rotary embedding of a part of the head."""

from typing import Any

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.routed import Routed


class Glm4Moe(Routed):
    model_type = "glm4_moe"

    def transformer(self, hf: Config) -> dict[str, Any]:
        return {**super().transformer(hf), "add_qkv_bias": hf.attention_bias, "qk_layernorm": hf.use_qk_norm}

    def model(self, hf: Config) -> dict[str, Any]:
        return {**super().model(hf), "rotary_percent": hf.rope_parameters.get("partial_rotary_factor", 1.0)}
