import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.megatron.options import option_names, problems
from cairn.engines.training.megatron.permitted import PERMITTED
from tests.architectures import architecture
from tests.engines.training.builders import model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), layers=4)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("experts"), "qwen3_moe")


def found(folder: Path, ranks: int = 8, **megatron: Any) -> list[str]:
    return list(problems(TrainingConfig(engine="megatron", world_size=ranks, megatron=megatron), str(folder)))


def test_megatrons_own_options_pass(folder: Path) -> None:
    assert (
        found(folder, tensor_model_parallel_size=2, recompute_granularity="full", use_distributed_optimizer=True) == []
    )


HINTS = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "overlap_grad_reduction": "overlap_grad_reduce",
    "num_layers": "config.json",
    "lr": "training.lr",
    "hidden_dropout": "dropout",
    "cross_entropy_loss_fusion": "bfloat16",
    "moe_aux_loss_coeff": "count of tokens",
    "rotary_interleaved": "speeds up or checks",
    "window_size": "speeds up or checks",
    "fp8": "speeds up or checks",
    "decoupled_weight_decay": "speeds up or checks",
}
"""Options that cannot be set, and what is said instead."""
OF_EXPERTS = ("moe_router_topk", "moe_router_pre_softmax", "moe_ffn_hidden_size", "num_moe_experts")
"""Options of which a model with experts says the values itself."""


def test_what_cannot_be_set_is_named_with_the_way_out(folder: Path, experts: Path) -> None:
    said = {name: found(folder, **{name: 1}) for name in HINTS}
    said |= {name: found(experts, **{name: 3}) for name in OF_EXPERTS}
    hints = HINTS | dict.fromkeys(OF_EXPERTS, "config.json")
    wrong = {
        name: sentences
        for name, sentences in said.items()
        if len(sentences) != 1 or name not in sentences[0] or hints[name] not in sentences[0]
    }
    assert wrong == {}


def test_every_option_that_may_be_set_is_one_of_megatrons() -> None:
    assert frozenset().union(*option_names().values()) >= PERMITTED


PIPELINES: list[tuple[dict[str, Any], bool]] = [
    ({"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}, True),
    ({"num_layers_in_first_pipeline_stage": 1}, True),
    ({"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}, False),
    ({"num_layers_in_first_pipeline_stage": 4}, False),
    ({"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}, True),
    ({"account_for_loss_in_pipeline_split": True}, False),
    ({"virtual_pipeline_model_parallel_size": 2}, True),
    ({"virtual_pipeline_model_parallel_size": 3}, False),
    ({"virtual_pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}, False),
]
"""Pipelines of two stages for four layers, and whether Megatron can fill their stages."""


def test_pipelines_whose_stages_megatron_can_fill_pass(folder: Path) -> None:
    wrong = []
    for megatron, fits in PIPELINES:
        sentences = found(folder, pipeline_model_parallel_size=2, **megatron)
        if [("pipeline stages" in sentence) for sentence in sentences] != ([] if fits else [True]):
            wrong.append((megatron, sentences))
    assert wrong == []


def test_a_size_of_null_is_megatrons_default(folder: Path) -> None:
    sizes = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    )
    assert {name: found(folder, **{name: None}) for name in sizes} == {name: [] for name in sizes}


def test_experts_behind_tensor_parallelism_need_sequence_parallelism(experts: Path) -> None:
    (sentence,) = found(experts, tensor_model_parallel_size=2)
    assert "sequence_parallel: true" in sentence
    assert found(experts, tensor_model_parallel_size=2, sequence_parallel=True) == []


def test_float32_on_gpus_is_refused(folder: Path) -> None:
    training = TrainingConfig(engine="megatron", num_gpus_per_rank=1, dtype="float32")
    assert any("set training.dtype to bfloat16" in sentence for sentence in problems(training, str(folder)))


@pytest.fixture(scope="module")
def delta_nets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return architecture("qwen3_5").save(tmp_path_factory.mktemp("delta_nets"))


def test_heads_of_gated_delta_networks_are_cut_whole(delta_nets: Path) -> None:
    assert found(delta_nets, tensor_model_parallel_size=2) == []
    attention, delta_net = found(delta_nets, tensor_model_parallel_size=4)
    assert "2 key-value heads" in attention
    assert "2 key heads of the model's gated delta networks" in delta_net


def test_gated_delta_networks_on_gpus_need_their_kernels(delta_nets: Path) -> None:
    training = TrainingConfig(engine="megatron", num_gpus_per_rank=1, dtype="bfloat16")
    assert any("pip install flash-linear-attention" in sentence for sentence in problems(training, str(delta_nets)))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return architecture("glm_moe_dsa").save(tmp_path_factory.mktemp("sparse"))


def test_sparse_attention_is_cut_only_where_megatron_runs_it(sparse: Path) -> None:
    assert found(sparse, pipeline_model_parallel_size=2) == []
    (stages,) = found(sparse, pipeline_model_parallel_size=4)
    assert "layers 1, 3 and so on" in stages
    assert found(sparse, context_parallel_size=2, cp_comm_type="allgather") == []
    (gathered,) = found(sparse, context_parallel_size=2)
    assert "cp_comm_type: allgather" in gathered
    training = TrainingConfig(engine="megatron", num_gpus_per_rank=1, dtype="bfloat16")
    assert any("dsa_kernel_backend to tilelang or cudnn" in sentence for sentence in problems(training, str(sparse)))


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    narrow = {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96, "moe_intermediate_size": 20}
    made = architecture("moonlight")
    return replace(made, config={**made.config, **narrow}).save(tmp_path_factory.mktemp("latents"))


LAYOUTS_OF_LATENTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"tensor_model_parallel_size": 2}, []),
    ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}, []),
    ({"pipeline_model_parallel_size": 4, "context_parallel_size": 2}, []),
    ({"tensor_model_parallel_size": 3}, ["width of an expert of the model, 20", "shared experts of the model, 40"]),
    ({"tensor_model_parallel_size": 3, "expert_tensor_parallel_size": 1}, ["shared experts of the model, 40"]),
    ({"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1}, ["6 attention heads"]),
    ({"expert_model_parallel_size": 3}, ["8 experts"]),
    ({"apply_rope_fusion": True}, ["without YaRN"]),
    ({"kv_lora_rank": 8}, ["config.json"]),
    ({"moe_router_bias_update_rate": 0.1}, ["config.json"]),
]
"""Layouts of `latents`, and parts of the sentences that refuse them."""


def test_layouts_of_latent_attention_and_shared_experts_are_checked(latents: Path) -> None:
    wrong = []
    for megatron, parts in LAYOUTS_OF_LATENTS:
        sequence = {"sequence_parallel": True} if "tensor_model_parallel_size" in megatron else {}
        sentences = found(latents, 24, **sequence, **megatron)
        if len(sentences) != len(parts) or any(part not in said for part, said in zip(parts, sentences, strict=True)):
            wrong.append((megatron, sentences))
    assert wrong == []


def test_layouts_that_do_not_fit_the_model_are_refused(folder: Path) -> None:
    layouts: list[dict[str, Any]] = [
        {"tensor_model_parallel_size": 4},  # the model has two key-value heads
        {"pipeline_model_parallel_size": 8},  # and four layers
        {"expert_model_parallel_size": 2},  # and no experts
        {"moe_token_dispatcher_type": "allgather"},
    ]
    said = [(megatron, found(folder, **megatron)) for megatron in layouts]
    assert [(megatron, sentences) for megatron, sentences in said if len(sentences) != 1] == []


COMPUTING_SOMETHING_ELSE: list[tuple[dict[str, Any], str]] = [
    ({"tensor_model_parallel_size": 3}, "not divisible"),
    ({"sequence_parallel": True}, "tensor_model_parallel_size > 1"),
    (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "batch_p2p_comm": True},
        "wrong",
    ),
    (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": False},
        "wrong",
    ),
    ({"virtual_pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size > 1"),
    ({"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}, "sequence_parallel"),
    ({"context_parallel_size": "two"}, "whole number"),
]
"""Layouts with which Megatron would compute something else, and part of what is said of each."""


def test_layouts_that_compute_something_else_are_refused() -> None:
    unrefused = []
    for megatron, sentence in COMPUTING_SOMETHING_ELSE:
        try:
            TrainingConfig(engine="megatron", world_size=4, megatron=megatron)
            said = ""
        except ValidationError as error:
            said = str(error)
        if not re.search(sentence, said):
            unrefused.append((megatron, said))
    assert unrefused == []


def test_options_of_an_engine_that_is_not_used_are_refused() -> None:
    with pytest.raises(ValidationError, match="engine is torch"):
        TrainingConfig(megatron={"tensor_model_parallel_size": 1})


@pytest.mark.proof
def test_checking_options_imports_no_megatron(folder: Path) -> None:
    program = f"""
import sys
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.megatron.options import problems
assert not list(problems(TrainingConfig(engine="megatron", megatron={{"bucket_size": 1}}), {str(folder)!r}))
assert not [name for name in sys.modules if name.startswith("megatron")], "imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=280)
