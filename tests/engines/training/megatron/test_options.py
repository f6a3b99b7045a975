import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from configs.schema.training import TrainingConfig
from engines.training.megatron.options import problems
from tests.engines.training.builders import model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), layers=4)


def found(folder: Path, ranks: int = 8, **megatron: Any) -> list[str]:
    return list(problems(TrainingConfig(engine="megatron", world_size=ranks, megatron=megatron), str(folder)))


def test_megatrons_own_options_pass(folder: Path) -> None:
    assert (
        found(folder, tensor_model_parallel_size=2, recompute_granularity="full", use_distributed_optimizer=True) == []
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tensor_parallel_size", "tensor_model_parallel_size"),
        ("overlap_grad_reduction", "overlap_grad_reduce"),
        ("num_layers", "config.json"),
        ("lr", "training.lr"),
        ("hidden_dropout", "dropout"),
        ("cross_entropy_loss_fusion", "bfloat16"),
    ],
)
def test_what_cannot_be_set_is_named_with_the_way_out(folder: Path, name: str, hint: str) -> None:
    (sentence,) = found(folder, **{name: 1})
    assert name in sentence
    assert hint in sentence


@pytest.mark.parametrize(
    "megatron",
    [
        {"tensor_model_parallel_size": 4},  # the model has two key-value heads
        {"pipeline_model_parallel_size": 8},  # and four layers
        {"expert_model_parallel_size": 2},  # and no experts
        {"moe_token_dispatcher_type": "allgather"},
    ],
)
def test_layouts_that_do_not_fit_the_model_are_refused(folder: Path, megatron: dict[str, Any]) -> None:
    assert len(found(folder, **megatron)) == 1


@pytest.mark.parametrize(
    ("megatron", "sentence"),
    [
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
    ],
)
def test_layouts_that_compute_something_else_are_refused(megatron: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        TrainingConfig(engine="megatron", world_size=4, megatron=megatron)


def test_options_of_an_engine_that_is_not_used_are_refused() -> None:
    with pytest.raises(ValidationError, match="engine is torch"):
        TrainingConfig(megatron={"tensor_model_parallel_size": 1})


def test_checking_options_imports_no_megatron(folder: Path) -> None:
    program = f"""
import sys
from configs.schema.training import TrainingConfig
from engines.training.megatron.options import problems
assert not list(problems(TrainingConfig(engine="megatron", megatron={{"bucket_size": 1}}), {str(folder)!r}))
assert not [name for name in sys.modules if name.startswith("megatron")], "imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=280)
