"""Families of models that Megatron trains, one per file."""

from transformers import PretrainedConfig

from cairn.engines.training.megatron.families.base import Family
from cairn.engines.training.megatron.families.deepseek_v3 import DeepseekV3, Glm4MoeLite
from cairn.engines.training.megatron.families.glm4 import Glm4
from cairn.engines.training.megatron.families.glm4_moe import Glm4Moe
from cairn.engines.training.megatron.families.glm_moe_dsa import DeepseekV32, GlmMoeDsa
from cairn.engines.training.megatron.families.gpt_oss import GptOss
from cairn.engines.training.megatron.families.llama import Llama
from cairn.engines.training.megatron.families.minimax_m2 import MiniMaxM2
from cairn.engines.training.megatron.families.mistral import Mistral
from cairn.engines.training.megatron.families.qwen2 import Qwen2
from cairn.engines.training.megatron.families.qwen2_moe import Qwen2Moe
from cairn.engines.training.megatron.families.qwen3 import Qwen3
from cairn.engines.training.megatron.families.qwen3_5 import Qwen35, Qwen35Moe
from cairn.engines.training.megatron.families.qwen3_moe import Qwen3Moe
from cairn.engines.training.megatron.families.qwen3_next import Qwen3Next
from cairn.engines.training.megatron.families.seed_oss import SeedOss
from cairn.engines.types.errors import BadModel

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Qwen2(),
        Qwen2Moe(),
        Qwen3(),
        Qwen3Moe(),
        Qwen3Next(),
        Qwen35(),
        Qwen35Moe(),
        Llama(),
        Mistral(),
        GptOss(),
        SeedOss(),
        Glm4(),
        Glm4Moe(),
        Glm4MoeLite(),
        DeepseekV3(),
        GlmMoeDsa(),
        DeepseekV32(),
        MiniMaxM2(),
    )
}

UNMAPPED = {"deepseek_v4": "megatron-core has neither hyper-connections nor compressed attention"}
"""Known model types that are not supported, and why."""


def family_of(config: PretrainedConfig) -> Family:
    """Return the family of a model.

    Raises:
        BadModel: there is none, or Megatron would compute something else than the model's config specifies.
    """
    family = FAMILIES.get(config.model_type)
    if (reason := UNMAPPED.get(config.model_type)) is not None:
        raise BadModel(
            f"Megatron cannot train models of type {config.model_type}: {reason}; set training.engine to torch"
        )
    if family is None:
        raise BadModel(
            f"Megatron has no mapping for models of type {config.model_type}, only for {', '.join(sorted(FAMILIES))}: "
            "set training.engine to torch"
        )
    if problems := family.problems(config):
        raise BadModel(f"Megatron cannot train this {config.model_type} model: {'; '.join(problems)}")
    return family
