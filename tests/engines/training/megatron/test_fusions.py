"""Which fused kernels Megatron uses on a GPU, by model; TransformerConfig accepts them for every one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.configs.catalogue import published_config
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.plan.library import config_of
from cairn.engines.training.megatron.backend import backend_for, fusions_on_gpu
from cairn.engines.training.megatron.families import family_of

RECIPES = Path(__file__).parents[4] / "configs" / "recipes" / "models"
EXPERTS = {"moe_grouped_gemm", "moe_permute_fusion"}
USUAL = {"bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion"}
CASES: dict[str, set[str]] = {
    "Qwen3-4B": USUAL,
    "Qwen3-30B-A3B": USUAL | EXPERTS,
    "GLM-4.5": USUAL | EXPERTS,
    "GLM-Z1-9B-0414": USUAL,
    "DeepSeek-V3": (USUAL | EXPERTS) - {"apply_rope_fusion"},
    "gpt-oss-20b-bf16": (USUAL | EXPERTS) - {"apply_rope_fusion", "bias_dropout_fusion"},
}
"""Fusions by model: rotary embeddings of a latent or of YaRN are not fused."""

NEEDS_TRANSFORMER_ENGINE = {"apply_rope_fusion", "moe_permute_fusion"}
"""Fusions for which TransformerConfig looks for kernels, which a CPU does not have."""


def model(name: str) -> Any:
    published = published_config(name)
    assert published is not None, name
    return config_of(published).get_text_config()


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_trained_with_the_fusions_that_compute_the_same(name: str) -> None:
    hf = model(name)
    family = family_of(hf)
    fused = fusions_on_gpu(family.transformer(hf), family.model(hf), {})
    assert {option for option, on in fused.items() if on} - {"gradient_accumulation_fusion"} == CASES[name]


def test_activations_that_would_be_computed_twice_or_clamped_too_early_are_not_fused() -> None:
    assert not fusions_on_gpu({}, {}, {"use_te_activation_func": True})["bias_activation_fusion"]
    hf = model("gpt-oss-20b-bf16")
    of_model = family_of(hf).transformer(hf), family_of(hf).model(hf)
    assert not fusions_on_gpu(*of_model, {"moe_grouped_gemm": False})["bias_activation_fusion"]


@pytest.mark.parametrize("name", CASES)
def test_megatron_accepts_the_fusions_of_a_model_and_options_override_them(name: str) -> None:
    backend = backend_for(torch.device("cpu"))
    from cairn.engines.training.megatron.model import transformer_config

    def overrides(*of_model: Any) -> dict[str, Any]:
        fused = fusions_on_gpu(*of_model)
        return backend.overrides(*of_model) | {
            option: on for option, on in fused.items() if option not in NEEDS_TRANSFORMER_ENGINE
        }

    hf = model(name)
    on_gpu = replace(backend, overrides=overrides)
    config = transformer_config(TrainingConfig(engine="megatron"), on_gpu, family_of(hf), hf)
    assert config.bias_activation_fusion
    assert config.moe_grouped_gemm == ("moe_grouped_gemm" in CASES[name])
    plain = TrainingConfig(engine="megatron", megatron={"bias_activation_fusion": False})
    assert not transformer_config(plain, on_gpu, family_of(hf), hf).bias_activation_fusion


def test_no_recipe_sets_what_is_the_default() -> None:
    assert not [
        file.name for file in RECIPES.glob("*.yaml") if "fusion" in file.read_text() or "gemm" in file.read_text()
    ]
