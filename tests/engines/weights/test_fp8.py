"""Weights in FP8 as servers take them: the published formula, its inverse, and what a trainer sends."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.models.folders import open_weights, parameter_names
from cairn.engines.models.quantized import BlockFp8
from cairn.engines.training.rank import TrainingRank
from cairn.engines.training.weight_group import flatten
from cairn.engines.weights.buckets import Bucket
from cairn.engines.weights.fingerprint import weights_checksum
from cairn.engines.weights.fp8 import Fp8Weights, quantize
from tests.architectures import architecture
from tests.mtp_models import mtp_tensors
from tests.quantized_models import BLOCK, dequantized, fp8_folder

SCHEME = BlockFp8(*BLOCK)
WEIGHT = torch.randn(100, 130, generator=torch.Generator().manual_seed(0)) * 0.02
"""No multiple of a block in either direction."""


def all_sent(rank: TrainingRank) -> dict[str, torch.Tensor]:
    """Every tensor of the first version, as it leaves a trainer."""
    rank.begin_export(0, 100_000)
    sent: dict[str, torch.Tensor] = {}
    while (bucket := rank.next_bucket()[0]) is not None:
        sent |= bucket
    return sent


def test_a_blocks_greatest_number_becomes_448_and_its_scale_the_448th_part() -> None:
    weight = torch.tensor([[1.0, -896.0, 448.0], [3.5, 0.0, -26.0], [0.0, 0.0, 7.0]])
    values, scales = quantize(weight, BlockFp8(2, 2))
    assert scales.tolist() == [[2.0, 1.0], [pytest.approx(1e-12 / 448), 7 / 448]]
    assert values.float().tolist() == [[0.5, -448.0, 448.0], [1.75, 0.0, -26.0], [0.0, 0.0, 448.0]]


def test_what_comes_back_differs_by_half_a_step_of_the_format_at_most() -> None:
    """Three bits of mantissa: a sixteenth of a number, or where numbers are denormal half of 2^-9 of a scale."""
    for weight in (WEIGHT, WEIGHT.bfloat16()):
        values, scales = quantize(weight, SCHEME)
        assert (values.shape, scales.shape) == (weight.shape, (5, 4))
        error = (dequantized(values, scales, BLOCK) - weight.float()).abs()
        step = dequantized(torch.ones_like(values), scales, BLOCK)
        bound = torch.maximum(weight.float().abs() / 16, step / 1024) * (1 + 1e-6)
        assert (error <= bound).all()
        assert error.max() > 0


def test_what_came_back_becomes_the_same_bytes_again() -> None:
    values, scales = quantize(WEIGHT, SCHEME)
    repeated, scales_again = quantize(dequantized(values, scales, BLOCK), SCHEME)
    assert torch.equal(repeated.view(torch.uint8), values.view(torch.uint8))
    assert torch.allclose(scales_again, scales, rtol=2e-7)


def test_it_is_what_transformers_makes_of_whole_blocks() -> None:
    weight = WEIGHT[:96, :120].contiguous()
    config = SimpleNamespace(weight_block_size=BLOCK, scale_fmt=None)
    others = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"x.weight": weight})
    values, scales = quantize(weight, SCHEME)
    assert torch.allclose(scales, others["x.weight_scale_inv"], rtol=2e-7)
    # It multiplies where this divides: numbers in the middle between two of the format may go to either, as in slime's
    # quantizer, which multiplies too (624b824, slime/backends/megatron_utils/kernels/fp8_kernel.py).
    apart = (values.view(torch.uint8).int() - others["x.weight"].view(torch.uint8).int()).abs()
    assert apart.max() <= 1
    assert (apart == 0).float().mean() > 0.999


def test_scales_are_powers_of_two_where_the_folder_says_so() -> None:
    values, scales = quantize(WEIGHT, BlockFp8(*BLOCK, powers_of_two=True))
    assert torch.equal(scales.log2().round(), scales.log2())
    _, exact = quantize(WEIGHT, SCHEME)
    assert (scales >= exact).all()
    assert (scales < 2 * exact).all()
    assert (dequantized(values, scales, BLOCK) - WEIGHT).abs().max() <= WEIGHT.abs().max() / 16


def test_a_trainer_sends_servers_the_published_bytes_of_a_folder_that_it_began_with(tmp_path: Path) -> None:
    """Those of a folder as the formula makes it, whose every block has a number of the greatest magnitude."""
    fp8_folder("qwen3", tmp_path, mtp_tensors("deepseek_v3"), quantize_by=lambda weight: quantize(weight, SCHEME))
    published = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    rank = TrainingRank("127.0.0.1", TrainingConfig(num_threads=1, dtype="float32"))
    rank.start(ModelConfig(path=str(tmp_path)), AlgorithmConfig(), 1.0, 1, 0, None, str(tmp_path))
    sent = all_sent(rank)
    assert rank.sent_checksum() == weights_checksum(sent.items())
    assert rank.sent_checksum() != rank.checksum_at(0, "bfloat16"), "that is of the trainer's weights"
    fp8 = Fp8Weights.of(tmp_path)
    assert fp8 is not None
    assert sent.keys() == parameter_names(tmp_path) | fp8.scales
    assert len(fp8.names) == 4 * 7
    for name, tensor in sent.items():
        if name in fp8.scales:
            assert torch.allclose(tensor, published[name], rtol=2e-7), name
        else:
            assert torch.equal(tensor.float(), published[name].float()), name
            assert (tensor.dtype == torch.float8_e4m3fn) == (name in fp8.names)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_a_trainer_of_plain_weights_sends_them_in_the_format_of_the_folder_that_servers_load(
    name: str, tmp_path: Path
) -> None:
    """From another FP8 folder of the model, of which only names and blocks count, half as many bytes as in bfloat16."""
    plain = str(architecture(name).save(tmp_path / "plain"))
    fp8_folder(name, tmp_path / "fp8")
    training = TrainingConfig(num_threads=1, dtype="bfloat16")
    ranks = [TrainingRank("127.0.0.1", training) for _ in range(2)]
    for rank, served in zip(ranks, (None, str(tmp_path / "fp8")), strict=True):
        rank.start(ModelConfig(path=plain), AlgorithmConfig(), 1.0, 1, 0, None, served)
    weights, sent = map(all_sent, ranks)
    fp8 = Fp8Weights.of(tmp_path / "fp8")
    assert fp8 is not None
    assert fp8.names
    assert sent.keys() == weights.keys() | fp8.scales
    for key, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        expected = quantize(weight, SCHEME)[0] if key in fp8.names else weight
        assert sent[key].dtype == expected.dtype
        assert torch.equal(sent[key].view(torch.uint8), expected.view(torch.uint8)), key
    for key in fp8.names:
        whole, came_back = weights[key].float(), dequantized(sent[key], sent[f"{key}_scale_inv"], BLOCK)
        assert ((came_back - whole).abs() <= whole.abs().max() / 16).all()
        assert sent[key].nbytes == weights[key].nbytes / 2
    assert ranks[0].checksum_at(0, "bfloat16") == ranks[1].checksum_at(0, "bfloat16")


def test_they_travel_through_the_object_store_and_by_broadcast_as_they_are() -> None:
    values, scales = quantize(WEIGHT, SCHEME)
    bucket = Bucket({"w": values, "w_scale_inv": scales})
    arrived = pickle.loads(pickle.dumps(bucket))
    assert arrived["w"].dtype == torch.float8_e4m3fn
    assert all(torch.equal(arrived[name].view(torch.uint8), bucket[name].view(torch.uint8)) for name in bucket)
    layout, flat = flatten(bucket, torch.device("cpu"))
    assert layout == [("w_scale_inv", "float32", (5, 4)), ("w", "float8_e4m3fn", (100, 130))]
    assert torch.equal(flat[5 * 4 * 4 :].view(100, 130), values.view(torch.uint8))


def test_engines_that_read_what_weights_stand_for_are_sent_that(tmp_path: Path) -> None:
    weights = fp8_folder("qwen3", tmp_path)
    rank = TrainingRank("127.0.0.1", TrainingConfig(num_threads=1))
    rank.start(ModelConfig(path=str(tmp_path)), AlgorithmConfig(), 1.0, 1, 0, None)
    sent = all_sent(rank)
    assert sent.keys() == open_weights(tmp_path).keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in sent.items())


def test_a_folder_without_fp8_is_sent_as_it_is(tmp_path: Path) -> None:
    assert Fp8Weights.of(architecture("qwen3").save(tmp_path)) is None
