"""How ranks share activations, against the equations of Korthikanti et al., 2022."""

from typing import Any

import pytest

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.plan.activations import layer_bytes, micro_batches_in_flight, stage_activations
from tests.engines.plan.test_parameters import published


def megatron(**options: Any) -> TrainingConfig:
    return TrainingConfig(engine="megatron", world_size=64, num_gpus_per_rank=1, dtype="bfloat16", megatron=options)


def test_tensor_with_sequence_parallelism_divides_all_of_a_layer() -> None:  # equation 4
    model = published("Llama-3.1-8B-Instruct")
    whole = layer_bytes(model, model.layers[0], megatron(), 4096)
    cut = megatron(tensor_model_parallel_size=8, sequence_parallel=True)
    assert layer_bytes(model, model.layers[0], cut, 4096) == pytest.approx(whole / 8)


def test_tensor_parallelism_alone_leaves_what_is_outside_attention_and_feed_forward_part() -> None:  # equation 2
    model = published("Llama-3.1-8B-Instruct")
    alone = layer_bytes(model, model.layers[0], megatron(tensor_model_parallel_size=8), 4096)
    both = layer_bytes(model, model.layers[0], megatron(tensor_model_parallel_size=8, sequence_parallel=True), 4096)
    outside = 2 * 4096 * 2 + 2 * 4096 * 2  # inputs of two norms and of what follows them, in bfloat16
    assert alone - both == pytest.approx(outside * 7 / 8, rel=1e-3)


def test_the_first_stage_keeps_a_micro_batch_for_each_stage_and_an_interleaved_one_more() -> None:  # section 4.2.3
    p, v = 4, 2
    assert micro_batches_in_flight(megatron(pipeline_model_parallel_size=p), 0, 64) == p
    assert micro_batches_in_flight(megatron(pipeline_model_parallel_size=p), p - 1, 64) == 1
    interleaved = megatron(pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=v)
    assert micro_batches_in_flight(interleaved, 0, 64) == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_recomputation_keeps_the_input_of_every_layer() -> None:  # table 2
    model = published("Llama-3.1-8B-Instruct")
    training = megatron().model_copy(update={"gradient_checkpointing": True})
    activations = stage_activations(model, training, range(32), 0, tokens=1000, micro_batches=1, longest=1000)
    assert activations.retained == 2 * 1000 * 4096 * 32
    assert activations.recomputed == 1000 * layer_bytes(model, model.layers[0], training, 1000)
