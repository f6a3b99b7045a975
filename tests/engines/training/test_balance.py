"""The biases by which routers balance their experts: moved by every step, and state as weights are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.training.torch.engine import TorchEngine
from cairn.storage.opening import open_store
from tests.architectures import architecture
from tests.engines.rollout.models import rollout_config
from tests.engines.training.balance_cases import (
    EXPERTS,
    KNOWN,
    LAYERS,
    MEGATRON,
    MODEL,
    RATE,
    exported,
    launched,
    run,
)
from tests.engines.training.builders import make_engine, weights_of
from tests.engines.training.ranks import run_megatron_ranks, run_ranks

pytestmark = pytest.mark.timeout(900)

BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("balance")
    architecture(MODEL).save(work / MODEL)
    return work


@pytest.fixture(scope="module")
def one(work: Path) -> dict[str, Any]:
    run(work, "one rank")
    found: dict[str, Any] = json.loads((work / "one rank.json").read_text())
    return found


def biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if name.endswith(BIAS)}


def engine_with(work: Path, **training: Any) -> TorchEngine:
    return make_engine(work / MODEL, max_tokens_per_gpu=64, moe_router_bias_update_rate=RATE, **training)


def trained(engine: TorchEngine, version: int = 0) -> str:
    return engine.train(KNOWN, num_steps=1, expected_version=version, input_digest="d").state_digest


def test_a_step_moves_each_bias_by_the_sign_of_how_many_tokens_chose_its_expert(work: Path) -> None:
    """Wang et al. 2024, arXiv:2408.15664, algorithm 1, on counts by the library's own model, sample by sample."""
    model = AutoModelForCausalLM.from_pretrained(work / MODEL, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items() if name.endswith(BIAS)}
    counts: dict[int, torch.Tensor] = {layer: torch.zeros(EXPERTS) for layer in range(LAYERS)}
    blocks = [block for block in model.modules() if hasattr(block, "experts")]
    for layer, block in enumerate(blocks):
        block.experts.register_forward_pre_hook(
            lambda module, args, layer=layer: counts.update(
                {layer: counts[layer] + torch.bincount(args[1].flatten(), minlength=EXPERTS)}
            )
        )
    with torch.no_grad():
        for ids in KNOWN.input_ids:
            model(input_ids=torch.from_numpy(ids[None]).long())
    engine = engine_with(work)
    trained(engine)
    after = biases(weights_of(engine))
    assert len(after) == LAYERS
    for layer, (name, bias) in enumerate(after.items()):
        mean = counts[layer].sum() / EXPERTS
        expected = [RATE if count < mean else -RATE if count > mean else 0.0 for count in counts[layer]]
        assert np.allclose(bias - before[name], expected, atol=1e-7), name


def test_layers_that_are_computed_again_count_their_tokens_once(work: Path) -> None:
    moved = []
    for recomputes in (False, True):
        engine = engine_with(work, gradient_checkpointing=recomputes)
        trained(engine)
        moved.append(biases(weights_of(engine)))
    assert all(moved[0][name].equal(moved[1][name]) for name in moved[0])


def test_at_a_rate_of_zero_they_stay_as_they_were_published(work: Path) -> None:
    engine = make_engine(work / MODEL)
    before = biases(weights_of(engine))
    trained(engine)
    after = biases(weights_of(engine))
    assert all(value.any() and value.equal(after[name]) for name, value in before.items())


def test_they_are_saved_and_digested_and_a_restored_engine_goes_on_bit_for_bit(work: Path, tmp_path: Path) -> None:
    store, engine, still = open_store(str(tmp_path)), engine_with(work), make_engine(work / MODEL)
    assert trained(engine) != trained(still)
    engine.save(store, "checkpoint")
    restored = engine_with(work)
    restored.load(store, "checkpoint")
    assert restored.state_digest() == engine.state_digest()
    with torch.no_grad():
        next(value for name, value in restored._model.named_buffers() if name.endswith(BIAS)).add_(1e-3)
    assert restored._compute_digest() != engine.state_digest()
    restored.load(store, "checkpoint")
    assert trained(restored, 1) == trained(engine, 1)


def test_they_go_on_moving_after_a_stay_in_the_hosts_memory(work: Path) -> None:
    engine, away = engine_with(work), engine_with(work)
    for model in away._models():
        model._apply(torch.clone)  # as between a GPU and the host: buffers come back as other objects
    assert trained(away) == trained(engine)
    assert all(value.equal(biases(weights_of(away))[name]) for name, value in biases(weights_of(engine)).items())


def test_rollout_engines_get_them_exactly_in_any_number_format(work: Path) -> None:
    engine = engine_with(work)
    trained(engine)
    rollout = TransformersEngine(str(work / MODEL), rollout_config(dtype="bfloat16"))
    rollout.begin_weight_update(1)
    for bucket in engine.export_weights(1 << 16):
        rollout.update_weights(bucket)
    rollout.end_weight_update()
    assert rollout.weights_checksum() == engine.weights_checksum("bfloat16")
    stored = {name: value for name, value in rollout._model.named_buffers() if name.endswith(BIAS)}
    assert stored
    assert all(value.equal(stored[name]) for name, value in biases(weights_of(engine)).items())


def test_a_folder_that_is_exported_has_them(work: Path, tmp_path: Path) -> None:
    engine = engine_with(work)
    trained(engine)
    engine.export_hf(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    loaded = {name: value for name, value in model.named_buffers() if name.endswith(BIAS)}
    assert all(value.equal(loaded[name]) for name, value in biases(weights_of(engine)).items())


def test_adapters_do_not_go_with_biases_that_move() -> None:
    with pytest.raises(ValueError, match="only adapters are trained"):
        TrainingConfig(lora={"r": 4}, moe_router_bias_update_rate=1e-3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_ranks_count_the_tokens_of_both(work: Path, one: dict[str, Any]) -> None:
    run_ranks(launched, work, False, world_size=2)
    two = json.loads((work / "two ranks.json").read_text())
    assert_same(work, "two ranks", two, one)


@pytest.mark.slow
def test_megatron_moves_them_as_pytorch_does_and_follows_given_experts_of_grouped_routers(
    work: Path, one: dict[str, Any]
) -> None:
    run_megatron_ranks(launched, work, True, world_size=2)
    for name in MEGATRON:
        assert_same(work, name, json.loads((work / f"{name}.json").read_text()), one)


def assert_same(work: Path, name: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    for values, right in zip(found["scores"], expected["scores"], strict=True):
        assert np.abs(np.subtract(values, right)).max() < 2e-5, name
    for metric in ("routing_mismatch", "loss"):
        assert found["metrics"][metric] == pytest.approx(expected["metrics"][metric], abs=1e-5), name
    moved, right = (biases(exported(work, one)) for one in (name, "one rank"))
    assert moved.keys() == right.keys()
    assert len(right) == LAYERS
    assert all(value.equal(right[key]) for key, value in moved.items()), name


def test_given_experts_are_what_is_counted(work: Path, one: dict[str, Any]) -> None:
    free = engine_with(work)
    trained(free)
    moved, right = biases(weights_of(free)), biases(exported(work, "one rank"))
    assert any(not value.equal(right[name]) for name, value in moved.items())
