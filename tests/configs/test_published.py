"""Facts of published models: each makes the model whose size its authors tell, and its stored shapes are the
library's."""

import json

import pytest

from cairn.configs.catalogue import MODELS as FOLDER
from cairn.configs.catalogue import published_config, published_names, published_relative, published_repository
from cairn.engines.plan.published import SHAPES, made_model, published_model
from cairn.engines.training.megatron.families import FAMILIES

BILLIONS = {
    "DeepSeek-R1": 671,
    "DeepSeek-V3": 671,
    "DeepSeek-V3.1": 671,
    "GLM-4-9B-0414": 9.4,
    "GLM-4.5": 355,
    "GLM-4.5-Air": 106,
    "GLM-4.6": 355,
    "GLM-4.7": 355,
    "GLM-4.7-Flash": 30,
    "GLM-Z1-9B-0414": 9.4,
    "Kimi-K2-Instruct": 1026,
    "Llama-3.1-70B": 70.6,
    "Llama-3.1-70B-Instruct": 70.6,
    "Llama-3.1-8B-Instruct": 8.03,
    "Llama-3.2-3B-Instruct": 3.21,
    "Meta-Llama-3-70B": 70.6,
    "Meta-Llama-3-70B-Instruct": 70.6,
    "Meta-Llama-3-8B": 8.03,
    "Meta-Llama-3-8B-Instruct": 8.03,
    "MiMo-7B-RL": 7.62,
    "MiniMax-M2": 229,
    "MiniMax-M2.5": 229,
    "Moonlight-16B-A3B-Instruct": 15.96,
    "Qwen2.5-0.5B": 0.49,
    "Qwen2.5-1.5B": 1.54,
    "Qwen2.5-14B": 14.7,
    "Qwen2.5-32B": 32.5,
    "Qwen2.5-3B": 3.09,
    "Qwen2.5-72B": 72.7,
    "Qwen2.5-7B": 7.61,
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.72,
    "Qwen3-14B": 14.8,
    "Qwen3-235B-A22B": 235,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-32B": 32.8,
    "Qwen3-4B": 4.02,
    "Qwen3-4B-Instruct-2507": 4.02,
    "Qwen3-8B": 8.19,
    "Qwen3-Next-80B-A3B-Instruct": 80,
    "Qwen3-Next-80B-A3B-Thinking": 80,
    "Qwen3.5-27B": 27,
    "Qwen3.5-35B-A3B": 35,
    "Qwen3.6-27B": 27,
    "Qwen3.6-35B-A3B": 35,
    "Qwen3.8-27B": 27,
    "gpt-oss-120b": 116.8,
    "gpt-oss-120b-bf16": 116.8,
    "gpt-oss-20b": 20.9,
    "gpt-oss-20b-bf16": 20.9,
}
"""Parameters by the models' cards and reports, without the layers that predict several tokens ahead, without image
towers, and with one table where input and output share it."""


def test_published_configs_make_models_of_the_published_sizes() -> None:
    sizes = {name: published_model(name).parameters / 1e9 for name in published_names()}
    assert sizes == pytest.approx({name: BILLIONS[name] for name in published_names()}, rel=0.01)


ANEW = "write engines/plan/shapes.jsonl anew: python -m tests.published_shapes"


def is_as_the_library_makes_it(name: str) -> bool:
    """Whether the stored tensors are the library's, and so is all that is read of the config: every entry, and what
    Megatron makes of them."""
    stored, made = published_model(name), made_model(name)
    if stored.tensors != made.tensors or stored.layers != made.layers or stored.experts != made.experts:
        return False
    if any(getattr(made.config, entry) != value for entry, value in vars(stored.config).items()):
        return False
    family = FAMILIES.get(made.config.model_type)
    return family is None or all(
        read(stored.config) == read(made.config) for read in (family.transformer, family.model, family.problems)
    )


def test_shapes_are_stored_of_every_published_model() -> None:
    lines = SHAPES.read_text("utf-8").splitlines()
    assert [json.loads(line)["name"] for line in lines] == published_names(), ANEW


@pytest.mark.parametrize("name", ["GLM-4.7-Flash", "Qwen3.5-35B-A3B"])
def test_stored_shapes_are_those_of_the_library(name: str) -> None:
    assert is_as_the_library_makes_it(name), ANEW


@pytest.mark.proof
def test_all_stored_shapes_are_those_of_the_library() -> None:
    assert not [name for name in published_names() if not is_as_the_library_makes_it(name)], ANEW


def test_every_model_is_found_by_its_name_alone() -> None:
    assert sorted(file.stem for file in FOLDER.rglob("*.json")) == published_names() == sorted(BILLIONS)
    assert published_repository("Qwen3-4B") == "Qwen/Qwen3-4B"
    assert published_config("Qwen3-5B") is published_repository("Qwen3-5B") is None
    relatives = {"qwen3-4b-sft": "Qwen3-4B", "Kimi-K2-Thinking-fp8": "Kimi-K2-Instruct", "Qwen3-5B": None}
    assert {name: published_relative(name) for name in relatives} == relatives
