"""FLOPs of an update by PaLM's formula, on models whose parameters are counted by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig

from cairn.engines.plan.library import folder_size as model_size
from cairn.engines.plan.rates import ModelSize
from tests.architectures import architecture

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


def test_a_gated_delta_network_looks_at_no_tokens_and_has_the_work_of_its_state(tmp_path: Path) -> None:
    size = model_size(str(architecture("qwen3_5").save(tmp_path)))  # two such layers of four, hidden size 64, MLP of 96
    keys, values, heads = 2 * 16, 4 * 16, 4  # widths of all heads; those of values
    projections = 64 * (2 * keys + 2 * values + 2 * heads) + 4 * (2 * keys + values) + values * 64
    attention = 64 * (2 * 4 * 16 + 2 * 2 * 16) + 4 * 16 * 64  # with a gate as wide as the queries
    assert size.parameters == 2 * (projections + 3 * heads * 16 * 16) + 2 * attention + 4 * 3 * 64 * 96 + 320 * 64
    assert (size.attention, size.windowed) == (2 * 4 * 16, 0)


def test_in_a_sliding_window_a_token_looks_at_no_more_than_it_holds(tmp_path: Path) -> None:
    size = model_size(str(architecture("gpt_oss").save(tmp_path)))  # two layers of four, a window of 16
    assert (size.attention, size.windowed, size.window) == (2 * 4 * 16, 2 * 4 * 16, 16)
    attention = 64 * (4 + 2 + 2) * 16 + 4 * 16 * 64
    experts = 8 * 64 + 3 / 8 * 8 * 3 * 64 * 96  # the router, and three of eight
    assert size.parameters == 4 * (attention + experts) + 320 * 64
    assert size.training_flops([10, 20]) - 6 * size.parameters * 30 == 12 * 128 * (100 + 400 + 10 * 10 + 20 * 16)


def test_latent_attention_counts_the_sizes_of_keys_and_values(tmp_path: Path) -> None:
    size = model_size(str(architecture("deepseek_v3").save(tmp_path)))
    assert size.attention == 4 * 4 * (16 + 8 + 12) / 2
    projections = 64 * 24 + 24 * 4 * (16 + 8) + 64 * (16 + 8) + 16 * 4 * (16 + 12) + 4 * 12 * 64
    router, expert = 64 * 16, 3 * 64 * 32
    layers = 4 * projections + 3 * 64 * 96 + 3 * (router + (4 + 1) * expert)  # the first is dense
    assert size.parameters == layers + 64 * 320


def test_what_is_not_trained_does_not_count(tmp_path: Path) -> None:
    folder = architecture("qwen2").save(tmp_path)
    size = model_size(str(folder))
    tensors = load_file(folder / "model.safetensors")
    names = ("model.mtp_layers.0.input_proj.weight", "model.layers.4.mlp.up_proj.weight", "model.visual.merger.weight")
    save_file({**tensors, **{name: torch.ones(3, 5) for name in names}}, folder / "model.safetensors")
    model_size.cache_clear()
    assert model_size(str(folder)) == size


def test_a_token_takes_six_operations_a_parameter_and_twelve_of_attention_for_each_before_it() -> None:
    size = ModelSize(parameters=1000, attention=10)
    assert size.training_flops([3, 5]) == 6 * 1000 * 8 + 12 * 10 * (9 + 25)
