"""Facts of published models: each makes the model whose size its authors tell."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cairn.configs.catalogue import MODELS as FOLDER
from cairn.configs.catalogue import published_config, published_names, published_relative, published_repository
from cairn.engines.models.folders import read_config

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


@pytest.mark.proof
def test_published_configs_make_models_of_the_published_sizes(tmp_path: Path) -> None:
    sizes = {}
    for name in published_names():
        (tmp_path / "config.json").write_text(json.dumps(published_config(name)))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(read_config(tmp_path).get_text_config())
        sizes[name] = sum(weight.numel() for weight in model.parameters()) / 1e9
    assert sizes == pytest.approx({name: BILLIONS[name] for name in published_names()}, rel=0.01)


def test_every_model_is_found_by_its_name_alone() -> None:
    assert sorted(file.stem for file in FOLDER.rglob("*.json")) == published_names() == sorted(BILLIONS)
    assert published_repository("Qwen3-4B") == "Qwen/Qwen3-4B"
    assert published_config("Qwen3-5B") is published_repository("Qwen3-5B") is None
    relatives = {"qwen3-4b-sft": "Qwen3-4B", "Kimi-K2-Thinking-fp8": "Kimi-K2-Instruct", "Qwen3-5B": None}
    assert {name: published_relative(name) for name in relatives} == relatives
