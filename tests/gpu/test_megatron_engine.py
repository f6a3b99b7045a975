"""The Megatron engine on a GPU, with Transformer Engine where it is installed, else with PyTorch's modules.

Needs neither Ray nor SGLang.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.factory import make_engine
from cairn.engines.training.megatron import backend
from cairn.storage.opening import open_store
from tests.engines.training import builders
from tests.gpu.torch_modules import torch_modules

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALGORITHM = AlgorithmConfig(entropy_coef=0.01, use_kl_loss=True, kl_loss_coef=0.05, use_tis=True)
BATCH = builders.make_batch(24, old=True, rollout=True, ref=True)
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "lr": 1e-3,
    "max_tokens_per_gpu": 200,
    "adam_eps": 1e-5,
    "clip_grad": 0.1,
}
LOG_PROBS, LOSS, NORM = 1e-1, 1e-2, 5e-2
"""Largest differences, that of the norm relative, of two implementations that compute in bfloat16."""


@pytest.fixture(scope="module", autouse=True)
def _layers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("transformer_engine") is None:
            patch.setattr(backend, "_gpu", torch_modules)
        yield


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builders.model_folder(tmp_path_factory.mktemp("model"), request.param)


def megatron(folder: Path, algorithm: AlgorithmConfig = ALGORITHM, **options: Any) -> Any:
    return make_engine(
        ModelConfig(path=str(folder)),
        TrainingConfig.model_validate({"engine": "megatron", "num_gpus_per_rank": 1, **OPTIONS, **options}),
        algorithm,
        temperature=1.0,
        total_steps=100,
        device="cuda",
    )


def first_update(engine: Any) -> dict[str, float]:
    """Of later ones the loss turns on which tokens it clips, and that on the last bit."""
    metrics: dict[str, float] = engine.train(BATCH, num_steps=1, expected_version=0, input_digest="d").metrics
    return metrics


def test_log_probs_and_an_update_are_near_those_of_the_torch_engine(folder: Path) -> None:
    reference = builders.make_engine(folder, algorithm=ALGORITHM, device="cuda", **OPTIONS)
    engine = megatron(folder)
    for found, expected in zip(engine.score(BATCH, "actor"), reference.score(BATCH, "actor"), strict=True):
        np.testing.assert_allclose(found, expected, atol=LOG_PROBS)
    found, expected = first_update(engine), first_update(reference)
    assert found["loss"] == pytest.approx(expected["loss"], abs=LOSS)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=NORM)


def test_values_and_an_update_of_a_critic_are_near_those_of_the_torch_engine(folder: Path) -> None:
    ppo = ALGORITHM.model_copy(update={"advantage_estimator": "ppo"})
    engines = (
        builders.make_engine(folder, algorithm=ppo, device="cuda", **OPTIONS),
        megatron(folder, algorithm=ppo),
    )
    for expected, found in zip(*(engine.score(BATCH, "critic") for engine in engines), strict=True):
        np.testing.assert_allclose(found, expected, atol=LOG_PROBS)
    expected, found = map(first_update, engines)
    assert found["value_loss"] == pytest.approx(expected["value_loss"], abs=LOSS)
    assert found["critic_grad_norm"] == pytest.approx(expected["critic_grad_norm"], rel=NORM)


def test_a_checkpoint_goes_on_where_it_was_saved(folder: Path, tmp_path: Path) -> None:
    engine, store = megatron(folder), open_store(str(tmp_path))
    engine.train(BATCH, num_steps=1, expected_version=0, input_digest="d")
    engine.save(store, "one")
    saved = engine.state_digest()
    engine.train(BATCH, num_steps=1, expected_version=1, input_digest="d")
    after = engine.state_digest()
    engine.load(store, "one")
    assert engine.state_digest() == saved
    engine.train(BATCH, num_steps=1, expected_version=1, input_digest="d")
    assert engine.state_digest() == after


@pytest.mark.parametrize("distributed", [False, True])
def test_offloading_frees_the_gpu_and_updates_around_it_end_in_the_same_bits(folder: Path, distributed: bool) -> None:
    options: dict[str, Any] = {"megatron": {"use_distributed_optimizer": distributed}}
    digests = []
    for offloads in (False, True):
        engine = megatron(folder, **options)
        for version in range(3):
            engine.train(BATCH, num_steps=1, expected_version=version, input_digest="d")
            if not offloads:
                continue
            parameters = sum(t.numel() for bucket in engine.export_weights(1 << 20) for t in bucket.values())
            held = torch.cuda.memory_allocated()
            engine.offload()
            # At least the trained weights, their masters, two moments and gradients: 2 + 4 × 4 bytes each.
            assert held - torch.cuda.memory_allocated() > 18 * parameters
            shared = {name: t for bucket in engine.export_on_device(1 << 20) for name, t in bucket.items()}
            given = {name: t for bucket in engine.export_weights(1 << 20) for name, t in bucket.items()}
            assert all(tensor.is_cuda and tensor.cpu().equal(given[name]) for name, tensor in shared.items())
            del shared
            engine.onload()
        digests.append(engine.state_digest())
        del engine
        torch.cuda.empty_cache()
    assert digests[0] == digests[1]


def test_exported_weights_are_those_of_the_folder(folder: Path) -> None:
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    exported = {name: tensor for bucket in megatron(folder).export_weights(1 << 20) for name, tensor in bucket.items()}
    assert set(exported) == set(weights)
    assert all(torch.equal(exported[name], weight.bfloat16()) for name, weight in weights.items())
