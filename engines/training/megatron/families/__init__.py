"""Families of models that Megatron trains, by what they have in common."""

from cairn.engines.models.configs import Config
from cairn.engines.training.megatron.families.base import Family
from cairn.engines.training.megatron.families.dense import Glm4, Llama, Mistral, Qwen2, Qwen3, SeedOss
from cairn.engines.training.megatron.families.experts import Qwen2Moe, Qwen3Moe
from cairn.engines.training.megatron.families.gated_delta import Qwen3Next, Qwen35, Qwen35Moe
from cairn.engines.training.megatron.families.gpt_oss import GptOss
from cairn.engines.training.megatron.families.latent_attention import DeepseekV3, DeepseekV32, Glm4MoeLite, GlmMoeDsa
from cairn.engines.training.megatron.families.routed import Glm4Moe, MiniMaxM2
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
        DeepseekV32(),
        GlmMoeDsa(),
        MiniMaxM2(),
    )
}

UNMAPPED = {"deepseek_v4": "megatron-core has neither hyper-connections nor compressed attention"}
"""Known model types that are not supported, and why."""


def family_of(config: Config) -> Family:
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
