"""FLOPs of an update by PaLM's formula, on models whose parameters are counted by hand."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig

from cairn.engines.flops import ModelSize, model_size

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
ATTENTION = 8 * 8 + 2 * 8 * 4 + 8 * 8
"""Queries, keys and values, output."""
MLP = 3 * 8 * 24
HEAD = 32 * 8


def saved(folder: Path, config: PretrainedConfig) -> str:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_models_parameters_are_those_of_its_matrix_products(tmp_path: Path, tied: bool) -> None:
    size = model_size(saved(tmp_path, LlamaConfig(**SIZES, tie_word_embeddings=tied)))
    assert size == ModelSize(parameters=3 * (ATTENTION + MLP) + HEAD, attention=3 * 2 * 4)


def test_of_experts_those_count_that_a_token_goes_through(tmp_path: Path) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)
    router = 8 * 4
    size = model_size(saved(tmp_path, config))
    assert size.parameters == 3 * (ATTENTION + 2 * MLP + router) + HEAD


def test_a_token_takes_six_operations_a_parameter_and_twelve_of_attention_for_each_before_it() -> None:
    size = ModelSize(parameters=1000, attention=10)
    assert size.training_flops([3, 5]) == 6 * 1000 * 8 + 12 * 10 * (9 + 25)
