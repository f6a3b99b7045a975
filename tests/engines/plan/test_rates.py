"""Seconds from rates, against closed forms."""

import pytest

from cairn.configs.catalogue import gpu_names, hardware
from cairn.engines.plan.peaks import peak_tflops
from cairn.engines.plan.rates import Decoding, bubble, model_size
from cairn.engines.plan.serving import Serving
from tests.engines.plan.test_parameters import published


def engine(model: str, ranks: int = 1) -> Decoding:
    machine = hardware("h100").model_copy(update={"mfu": 1.0, "mbu": 1.0})
    return Decoding(published(model), Serving(ranks, dense_tensor=ranks), 2, 2, machine, 989.4e12)


def test_a_sample_alone_waits_for_the_weights_to_be_read() -> None:
    assert engine("Qwen3-4B").step(1, 0) == pytest.approx(2 * 4.0225e9 / 3350e9, rel=1e-3)
    assert engine("Qwen3-4B", 2).step(1, 0) == pytest.approx(4.0225e9 / 3350e9, rel=1e-2)


def test_a_sample_of_a_mixture_reads_the_experts_that_it_is_sent_to_and_many_read_all() -> None:
    moe = engine("Qwen3-30B-A3B")
    assert moe.step(1, 0) == pytest.approx(2 * 3.353e9 / 3350e9, rel=1e-2)
    assert moe.step(100, 0) == pytest.approx(2 * 30.53e9 / 3350e9, rel=1e-2)


def test_many_samples_wait_for_arithmetic() -> None:
    dense = engine("Qwen3-4B")
    assert dense.step(4096, 0) == pytest.approx(2 * 4.0225e9 * 4096 / 989.4e12, rel=1e-3)


def test_a_rollout_takes_as_long_as_its_longest_response_or_as_all_that_wait() -> None:
    dense = engine("Qwen3-4B")
    few, many = dense.seconds(8, 8, 100, 500, 1000), dense.seconds(800, 8, 100, 500, 1000)
    assert few == pytest.approx(1000 * dense.step(4, 350))
    assert many == pytest.approx(800 * 500 / 8 * dense.step(8, 350))


def test_an_update_takes_six_operations_a_parameter_and_token_and_those_of_attention() -> None:
    size = model_size(published("Llama-3.1-8B-Instruct"))
    products = 8.030e9 - 128256 * 4096
    assert size.training_flops([100]) == pytest.approx(6 * products * 100 + 12 * 32 * 32 * 128 * 100**2, rel=1e-3)


def test_a_pipeline_stands_idle_while_it_fills_and_empties() -> None:
    assert bubble(4, 6) == 0.5
    assert bubble(4, 6, 2) == 0.25


def test_the_operations_of_every_gpu_are_known() -> None:
    assert all(peak_tflops(hardware(name).device, "bfloat16") for name in gpu_names())
