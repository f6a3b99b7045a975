"""Training on samples with images, by the torch engine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from cairn.engines.models.folders import load_causal_lm
from cairn.engines.models.vision import image_processor
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.types import TrainBatch
from cairn.storage.opening import open_store
from tests.engines.rollout.models import collect, rollout_config
from tests.engines.training.builders import make_engine, part_of, weights_of
from tests.engines.training.ranks import run_ranks
from tests.vision import asked, dots


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dots(tmp_path_factory.mktemp("root") / "dots") / "untrained"


@pytest.fixture(scope="module")
def batch(folder: Path) -> TrainBatch:
    return sampled(folder)


def sampled(folder: Path) -> TrainBatch:
    """What a rollout engine made of prompts with and without images."""
    requests = asked(folder, samples=2)
    samples = collect(TransformersEngine(str(folder), rollout_config()), requests)
    completions = [samples[request.request_id] for request in requests]
    draw = np.random.default_rng(0)
    return TrainBatch(
        input_ids=[
            np.concatenate([request.input_ids, one.response_ids]).astype(np.int32)
            for request, one in zip(requests, completions, strict=True)
        ],
        response_lengths=[len(one.response_ids) for one in completions],
        loss_mask=[np.ones(len(one.response_ids), np.uint8) for one in completions],
        advantages=[np.full(len(one.response_ids), draw.normal(), np.float32) for one in completions],
        old_log_probs=[one.log_probs for one in completions],
        rollout_log_probs=[one.log_probs for one in completions],
        images=[request.images for request in requests],
    )


def train(engine: Any, batch: TrainBatch) -> dict[str, float]:
    version = engine.position().weight_version
    return engine.train(batch, num_steps=1, expected_version=version, input_digest="d").metrics


@pytest.mark.parametrize("max_tokens", [None, 60])
def test_log_probs_are_those_of_the_rollout(folder: Path, batch: TrainBatch, max_tokens: int | None) -> None:
    scores = make_engine(folder, max_tokens_per_gpu=max_tokens).score(batch, "actor")
    assert batch.rollout_log_probs is not None
    for found, expected in zip(scores, batch.rollout_log_probs, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)


def test_gradients_are_those_of_the_librarys_own_passes_over_one_sample_at_a_time(
    folder: Path, batch: TrainBatch
) -> None:
    """Loss: policy gradient at ratio 1, whose gradient is that of - advantage * log-prob, a mean over each sample's
    tokens and then over samples."""
    engine = make_engine(folder, max_tokens_per_gpu=60, lr=1e-9, clip_grad=0.0)
    train(engine, batch)
    model: Any = load_causal_lm(folder, torch.float32)
    assert batch.images is not None
    assert batch.advantages is not None
    for ids, length, images, advantages in zip(
        batch.input_ids, batch.response_lengths, batch.images, batch.advantages, strict=True
    ):
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        inputs: dict[str, Any] = {}
        if images:
            inputs = dict(image_processor(str(folder))(images=pictures(images), return_tensors="pt"))
            inputs["mm_token_type_ids"] = (tokens == model.config.image_token_id).int()
        logits = model(input_ids=tokens, use_cache=False, **inputs).logits[0, -length - 1 : -1]
        model.base_model.rope_deltas = None
        chosen = torch.log_softmax(logits, -1).gather(1, tokens[0, -length:, None])[:, 0]
        (-(torch.from_numpy(advantages) * chosen).mean() / len(batch)).backward()
    found = dict(engine._model.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert found[name].grad is not None, name
        assert torch.allclose(found[name].grad, parameter.grad, atol=1e-6, rtol=1e-3), name
    assert model.model.visual.patch_embed.proj.weight.grad.abs().max() > 1e-6


def pictures(images: Any) -> list[Any]:
    from io import BytesIO

    from PIL.Image import open as opened

    return [opened(BytesIO(image.data)) for image in images]


def test_a_frozen_vision_tower_stays_as_it_is(folder: Path, batch: TrainBatch) -> None:
    frozen = make_engine(folder, freeze_params_name_list=("visual",))
    before = weights_of(frozen)
    train(frozen, batch)
    moved = {name for name, weight in weights_of(frozen).items() if not torch.equal(weight, before[name])}
    assert moved
    assert not any(name.startswith("visual.") for name in moved)
    whole = make_engine(folder)
    train(whole, batch)
    visual = {name for name in before if name.startswith("visual.")}
    assert visual
    assert all(not torch.equal(weights_of(whole)[name], before[name]) for name in visual)


def test_weights_reach_rollout_engines_and_folders_by_the_names_of_published_ones(
    folder: Path, batch: TrainBatch, tmp_path: Path
) -> None:
    engine = make_engine(folder)
    train(engine, batch)
    engine.export_hf(tmp_path / "exported")
    with safe_open(tmp_path / "exported" / "model.safetensors", "pt") as new:
        with safe_open(folder / "model.safetensors", "pt") as old:
            assert set(new.keys()) == set(old.keys())
        assert any(name.startswith("visual.") for name in new.keys())  # noqa: SIM118
    (tmp_path / "exported" / "preprocessor_config.json").write_bytes((folder / "preprocessor_config.json").read_bytes())
    rollout = TransformersEngine(str(folder), rollout_config())
    rollout.begin_weight_update(1)
    for bucket in engine.export_weights(1 << 16):
        rollout.update_weights(bucket)
    rollout.end_weight_update()
    assert rollout.weights_checksum() == engine.weights_checksum()
    rollout.begin_weight_update(2)
    rollout.update_weights_from_disk(tmp_path / "exported")
    rollout.end_weight_update()
    assert rollout.weights_checksum() == engine.weights_checksum()


def test_a_checkpoint_brings_all_of_the_state_back(folder: Path, batch: TrainBatch, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    engine = make_engine(folder)
    train(engine, batch)
    engine.save(store, "saved")
    digest = engine.state_digest()
    train(engine, batch)
    after = engine.state_digest()
    other = make_engine(folder)
    other.load(store, "saved")
    assert other.state_digest() == digest
    train(other, batch)
    assert other.state_digest() == after


def test_adapters_learn_from_images(folder: Path, batch: TrainBatch) -> None:
    engine = make_engine(folder, lora={"r": 4, "target_modules": ["q_proj", "v_proj", "qkv"]})
    before = weights_of(engine)
    train(engine, batch)
    moved = {name for name, weight in weights_of(engine).items() if not torch.equal(weight, before[name])}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in moved} == {"q_proj", "v_proj", "qkv"}


def two_ranks(rank: int, folder: Path, work: Path, batch: TrainBatch) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=2)
    engine = make_engine(folder, max_tokens_per_gpu=60, rank=rank, world_size=2, adam_eps=1e-5)
    metrics = [train(engine, batch) for _ in range(2)]
    weights = weights_of(engine)
    if rank == 0:
        (work / "metrics.json").write_text(json.dumps(metrics))
        torch.save(weights, work / "weights.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_that_see_no_image_take_part_and_all_end_with_the_weights_of_one(
    folder: Path, batch: TrainBatch, tmp_path: Path
) -> None:
    assert batch.images is not None
    uneven = replace(part_of(batch, slice(6)), images=[(), (), (), (), *batch.images[4:6]])
    run_ranks(two_ranks, folder, tmp_path, uneven, world_size=2)
    alone = make_engine(folder, max_tokens_per_gpu=60, adam_eps=1e-5)
    metrics = [train(alone, uneven) for _ in range(2)]
    for found, expected in zip(json.loads((tmp_path / "metrics.json").read_text()), metrics, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for name, weight in torch.load(tmp_path / "weights.pt").items():
        assert torch.allclose(weight, weights_of(alone)[name], atol=1e-5), name
