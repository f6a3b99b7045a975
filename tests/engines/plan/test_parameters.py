"""Parameters that are counted from a config alone, against those that models are published with."""

import pytest

from cairn.configs.catalogue import published_config
from cairn.configs.schema.training import LoraConfig, TrainingConfig
from cairn.engines.plan.library import config_of, model_of
from cairn.engines.plan.ranks import adapter_size, parameters_by_stage, stages
from cairn.engines.plan.tensors import Model, Part
from cairn.engines.types.errors import BadModel
from tests.architectures import architecture


def published(name: str) -> Model:
    stored = published_config(name)
    assert stored is not None
    return model_of(config_of(stored))


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Qwen3-0.6B", 0.6e9, 0.6e9),
        ("Qwen3-8B", 8.2e9, 8.2e9),
        ("Qwen3-30B-A3B", 30.5e9, 3.3e9),
        ("Qwen3-235B-A22B", 235e9, 22e9),
        ("Llama-3.1-8B-Instruct", 8.03e9, 8.03e9),
        ("Meta-Llama-3-70B", 70.6e9, 70.6e9),
        ("DeepSeek-V3", 671e9, 37e9),
        ("Moonlight-16B-A3B-Instruct", 16e9, 3e9),
    ],
)
def test_parameters_are_those_of_the_model_card(name: str, total: float, active: float) -> None:
    model = published(name)
    assert model.parameters == pytest.approx(total, rel=0.01)
    assert model.active_parameters == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize(("name", "total", "active"), [("gpt-oss-120b", 116.83, 5.13), ("gpt-oss-20b", 20.91, 3.61)])
def test_a_model_card_that_leaves_out_the_embedding_agrees_without_it(name: str, total: float, active: float) -> None:
    model = published(name)
    embedding = next(tensor.size for tensor in model.tensors if tensor.part is Part.EMBEDDING)
    assert model.parameters / 1e9 == pytest.approx(total, abs=0.01)
    assert (model.active_parameters - embedding) / 1e9 == pytest.approx(active, abs=0.01)


@pytest.mark.parametrize(
    ("layers", "options", "sizes"),
    [
        (60, {}, [15, 15, 15, 15]),
        (61, {"num_layers_in_last_pipeline_stage": 13}, [16, 16, 16, 13]),
        (
            62,
            {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
            [15, 16, 16, 15],
        ),
    ],
)
def test_stages_hold_the_layers_that_megatron_deals_out(
    layers: int, options: dict[str, object], sizes: list[int]
) -> None:
    options = {**options, "pipeline_model_parallel_size": 4}
    found = stages(layers, TrainingConfig(engine="megatron", world_size=4, megatron=options))
    assert [len(stage) for stage in found] == sizes
    assert [layer for stage in found for layer in stage] == list(range(layers))


def test_the_ranks_of_a_layout_hold_the_model_once_and_its_embedding_twice_where_it_is_tied() -> None:
    model = published("Qwen3-4B")
    options = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
    by_stage = parameters_by_stage(model, TrainingConfig(engine="megatron", world_size=8, megatron=options))
    embedding = next(tensor.size for tensor in model.tensors if tensor.part is Part.EMBEDDING)
    whole = sum(tensor.size for tensor in model.tensors if tensor.part in (Part.WHOLE, Part.END))
    assert 4 * sum(stage.all for stage in by_stage) == pytest.approx(model.parameters + embedding + 3 * whole)


def test_adapters_are_those_that_peft_makes() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from cairn.engines.training.torch.lora import add_adapters

    lora = LoraConfig(r=4)
    config = architecture("llama").make_config()
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
        add_adapters(made, lora)
    trained = sum(value.numel() for value in made.parameters() if value.requires_grad)
    assert adapter_size(model_of(config), lora) == trained


@pytest.mark.parametrize("stored", [{"hidden_size": 64}, {"model_type": "nothing_known"}])
def test_a_config_without_an_architecture_is_refused(stored: dict[str, object]) -> None:
    with pytest.raises(BadModel, match=r"model_type|nothing_known"):
        config_of(stored)


def test_a_model_with_parts_that_the_plan_does_not_include_is_refused() -> None:
    with pytest.raises(BadModel, match="hyper-connections and compressed attention"):
        model_of(architecture("deepseek_v4").make_config())


def test_a_language_model_below_one_that_reads_images_is_planned_alone() -> None:
    alone = published_config("Kimi-K2-Instruct")
    model = model_of(config_of({"model_type": "kimi_k25", "text_config": alone, "vision_config": {}}))
    assert model.parameters == published("Kimi-K2-Instruct").parameters
