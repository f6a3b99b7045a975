import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.weights.fingerprint import fingerprint, weights_checksum
from cairn.storage.opening import open_store
from tests.architectures import VOCABULARY, architecture
from tests.engines.training.builders import make_batch, make_engine, model_folder, weights_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FULL = AlgorithmConfig(entropy_coef=0.01, use_kl_loss=True, kl_loss_coef=0.05, kl_loss_type="k3", use_tis=True)
BATCH = make_batch(24, old=True, rollout=True, ref=True)
OPTIONS = {"algorithm": FULL, "max_tokens_per_gpu": 200, "adam_eps": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def five_updates(folder: Path, **options: object):  # type: ignore[no-untyped-def]
    engine = make_engine(folder, **(OPTIONS | options))  # type: ignore[arg-type]
    metrics = [
        engine.train(BATCH, num_steps=1, expected_version=version, input_digest="d").metrics for version in range(5)
    ]
    return engine, metrics


def test_float32_updates_equal_those_of_the_cpu(folder: Path) -> None:
    (cpu, expected), (gpu, found) = five_updates(folder), five_updates(folder, device="cuda")
    for a, b in zip(expected, found, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
    for name, weight in weights_of(cpu).items():
        assert torch.allclose(weight, weights_of(gpu)[name], atol=2e-5), name
    for a, b in zip(cpu.score(BATCH, "actor"), gpu.score(BATCH, "actor"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_updates_end_in_the_same_bits(folder: Path, dtype: str) -> None:
    first, second = (five_updates(folder, device="cuda", dtype=dtype)[0] for _ in range(2))
    assert first.state_digest() == second.state_digest()


def test_bfloat16_updates_stay_near_those_of_float32(folder: Path) -> None:
    (_, exact), (_, half) = five_updates(folder, device="cuda"), five_updates(folder, device="cuda", dtype="bfloat16")
    for a, b in zip(exact, half, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=0.1, abs=0.02)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.1)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_packed_rows_score_as_padded_ones_do(tmp_path: Path, family: str) -> None:
    folder = architecture(family).save(tmp_path / "model")
    batch = dataclasses.replace(BATCH, input_ids=[ids % VOCABULARY for ids in BATCH.input_ids])

    def scored(packed: bool, dtype: str) -> np.ndarray:
        engine = make_engine(folder, device="cuda", dtype=dtype, sequence_packing=packed, max_tokens_per_gpu=200)
        return np.concatenate(engine.score(batch, "actor"))

    exact = scored(False, "float32")
    np.testing.assert_allclose(scored(True, "float32"), exact, atol=1e-4)
    error = np.abs(scored(False, "bfloat16") - exact).mean()
    assert np.abs(scored(True, "bfloat16") - exact).mean() < 2 * error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_rows_train_as_padded_ones_do_and_twice_to_the_same_bits(folder: Path, dtype: str) -> None:
    (_, padded), (first, packed), (second, _) = (
        five_updates(folder, device="cuda", dtype=dtype, sequence_packing=on) for on in (False, True, True)
    )
    for a, b in zip(padded, packed, strict=True):
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.1 if dtype == "bfloat16" else 1e-3)
    assert first.state_digest() == second.state_digest()


def test_recomputed_activations_give_the_same_update(folder: Path) -> None:
    (kept, _), (recomputed, _) = (
        five_updates(folder, device="cuda", gradient_checkpointing=on) for on in (False, True)
    )
    for name, weight in weights_of(kept).items():
        assert torch.allclose(weight, weights_of(recomputed)[name], atol=1e-5), name


def test_fingerprints_and_digests_of_equal_bits_are_those_of_the_cpu(folder: Path) -> None:
    whole = torch.randn(5 * (1 << 16) + 99, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fingerprint(whole.cuda(), 12345).cpu(), fingerprint(whole, 12345))
    cpu, gpu = make_engine(folder), make_engine(folder, device="cuda")
    assert gpu.state_digest() == cpu.state_digest()
    assert gpu.weights_checksum("bfloat16") == cpu.weights_checksum("bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_critic_is_trained_as_on_the_cpu_and_moves_out_of_the_way_with_the_actor(folder: Path, dtype: str) -> None:
    options: dict[str, Any] = {"algorithm": AlgorithmConfig(advantage_estimator="ppo"), "dtype": dtype}
    (cpu, expected), (gpu, found) = five_updates(folder, **options), five_updates(folder, **options, device="cuda")
    for a, b in zip(expected, found, strict=True):
        assert b["value_loss"] == pytest.approx(a["value_loss"], rel=1e-3 if dtype == "float32" else 0.05)
    values = gpu.score(BATCH, "critic")
    if dtype == "float32":
        for a, b in zip(cpu.score(BATCH, "critic"), values, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-3)
    held = torch.cuda.memory_allocated()
    gpu.offload()
    assert torch.cuda.memory_allocated() < held
    gpu.onload()
    for a, b in zip(gpu.score(BATCH, "critic"), values, strict=True):
        np.testing.assert_array_equal(a, b)


def test_adapters_are_trained_as_on_the_cpu_and_given_out_the_same_while_offloaded(folder: Path) -> None:
    lora = {"r": 4, "lora_alpha": 12}
    (cpu, expected), (gpu, found) = five_updates(folder, lora=lora), five_updates(folder, lora=lora, device="cuda")
    for a, b in zip(expected, found, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
    given, checksum = weights_of(gpu), gpu.weights_checksum()
    for name, weight in weights_of(cpu).items():
        assert torch.allclose(weight, given[name], atol=2e-5), name
    gpu.offload()
    assert weights_checksum(weights_of(gpu).items()) == weights_checksum(given.items()) == checksum
    on_device = {name: tensor for bucket in gpu.export_on_device(50_000) for name, tensor in bucket.items()}
    assert all(tensor.is_cuda and tensor.cpu().equal(given[name]) for name, tensor in on_device.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_saved_on_the_gpu_loads_on_the_cpu(folder: Path, tmp_path: Path, dtype: str) -> None:
    engine, _ = five_updates(folder, device="cuda", dtype=dtype)
    store = open_store(str(tmp_path))
    engine.save(store, "c")
    other = make_engine(folder, dtype=dtype)
    other.load(store, "c")
    assert other.position().state_digest == engine.state_digest()
