"""The critic beside the actor: its values, its updates, and that both are one state."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.torch.engine import TorchEngine
from cairn.engines.training.value_model import load_value_model
from cairn.engines.types.errors import BadModel, EngineError, NotFinite
from cairn.engines.types.types import TrainBatch
from cairn.storage.opening import open_store
from tests.engines.training.builders import make_batch, make_engine, model_folder, weights_of

PPO = AlgorithmConfig(advantage_estimator="ppo")
LR, CRITIC_LR, CLIP = 1e-3, 3e-3, 0.5


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    return make_batch(old=True)


def critic_of(folder: Path, critic: Path, /, **options: Any) -> TorchEngine:
    return TorchEngine(
        ModelConfig(path=str(folder), critic_path=str(critic)),
        TrainingConfig(num_threads=1, **options),
        PPO,
        temperature=0.5,
        total_steps=10,
    )


def classifier_folder(path: Path, folder: Path) -> tuple[Path, PreTrainedModel]:
    """A token classifier with one label, as transformers makes and writes it."""
    torch.manual_seed(5)
    model = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)
    torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(path)
    return path, model.eval()


def test_values_are_a_classifiers_at_the_positions_that_predict_the_tokens_at_any_temperature(
    folder: Path, tmp_path: Path, batch: TrainBatch
) -> None:
    critic, model = classifier_folder(tmp_path / "critic", folder)
    values = critic_of(folder, critic).score(batch, "critic")
    for ids, length, found in zip(batch.input_ids, batch.response_lengths, values, strict=True):
        with torch.no_grad():
            expected = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, -length - 1 : -1, 0]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_language_model_gets_one_value_head_for_all_times(folder: Path) -> None:
    heads = [load_value_model(folder, torch.float32).get_output_embeddings() for _ in range(2)]
    assert heads[0].weight.shape == (1, 64)
    assert heads[0].weight.equal(heads[1].weight)
    assert heads[0].weight.std().item() == pytest.approx(0.02, rel=0.3)
    assert heads[0].bias.tolist() == [0]


def test_values_are_not_bounded_as_logits_of_some_families_are(tmp_path: Path) -> None:
    critic = load_value_model(model_folder(tmp_path, "gemma2"), torch.float32)  # soft-caps its logits at 2
    torch.nn.init.constant_(critic.get_output_embeddings().bias, 100)
    assert critic(torch.tensor([[1, 2, 3]])).logits.min().item() > 90


def test_a_head_of_another_shape_is_refused(folder: Path, tmp_path: Path) -> None:
    AutoModelForTokenClassification.from_pretrained(folder, num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(BadModel, match="use a classifier with one label"):
        load_value_model(tmp_path, torch.float32)


@pytest.mark.parametrize("own", [False, True])
def test_updates_of_the_critic_equal_those_written_out_in_plain_pytorch(
    folder: Path, tmp_path: Path, batch: TrainBatch, own: bool
) -> None:
    path, model = classifier_folder(tmp_path / "critic", folder)
    options: dict[str, Any] = {"lr": LR, "critic_lr": CRITIC_LR, "clip_grad": CLIP, "max_tokens_per_gpu": 120}
    if own:
        critic = {"clip_grad": CLIP, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-6, "weight_decay": 0.1}
        options |= {"clip_grad": 1e-3, "critic": critic}
    engine = critic_of(folder, path, **options)
    parameters = list(model.parameters())
    betas, eps, decay = ((0.8, 0.95), 1e-6, 0.1) if own else ((0.9, 0.98), 1e-8, 0.0)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=CRITIC_LR, betas=betas, eps=eps)
    for version in range(3):
        result = engine.train(batch, num_steps=1, expected_version=version, input_digest="d")
        losses = []
        for i, (ids, mask) in enumerate(zip(batch.input_ids, batch.loss_mask, strict=True)):
            assert batch.values is not None
            assert batch.returns is not None
            values = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, -len(mask) - 1 : -1, 0]
            old, returns, trained = (
                torch.from_numpy(a) for a in (batch.values[i], batch.returns[i], mask.astype(bool))
            )
            error = torch.maximum(
                (torch.minimum(torch.maximum(values, old - 0.2), old + 0.2) - returns) ** 2, (values - returns) ** 2
            )
            losses.append(error[trained].mean())
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        assert result.metrics["value_loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert result.metrics["critic_grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert (result.metrics["lr"], result.metrics["critic_lr"]) == (LR, CRITIC_LR)
    values = engine.score(batch, "critic")
    with torch.no_grad():
        last = model(torch.from_numpy(batch.input_ids[0].astype(np.int64))[None]).logits[0, :, 0]
    np.testing.assert_allclose(values[0], last[-len(values[0]) - 1 : -1], atol=2e-4)


def test_the_actor_is_trained_as_it_is_without_a_critic(folder: Path, batch: TrainBatch) -> None:
    alone, with_critic = make_engine(folder), make_engine(folder, algorithm=PPO)
    for engine in (alone, with_critic):
        engine.train(batch, num_steps=2, expected_version=0, input_digest="d")
    assert alone.weights_checksum() == with_critic.weights_checksum()
    assert alone.state_digest() != with_critic.state_digest()


def test_without_training_the_actor_the_critic_alone_learns_and_the_actors_schedule_waits(
    folder: Path, batch: TrainBatch
) -> None:
    waiting = PPO.model_copy(update={"num_critic_only_steps": 2})
    options = {"lr_warmup_iters": 4, "critic_lr": CRITIC_LR}
    engine, plain = make_engine(folder, algorithm=waiting, **options), make_engine(folder, **options)
    before = engine.weights_checksum(), engine.score(batch, "critic")
    for version in range(2):
        critic_only = engine.train(batch, num_steps=1, expected_version=version, input_digest="d", train_actor=False)
        assert {"value_loss", "critic_lr"} <= set(critic_only.metrics)
        assert "loss" not in critic_only.metrics
    assert engine.weights_checksum() == before[0]
    assert any(not np.array_equal(a, b) for a, b in zip(engine.score(batch, "critic"), before[1], strict=True))
    result = engine.train(batch, num_steps=2, expected_version=2, input_digest="d")
    expected = plain.train(batch, num_steps=2, expected_version=0, input_digest="d")
    assert result.metrics["lr"] == expected.metrics["lr"]
    assert engine.weights_checksum() == plain.weights_checksum()  # as from a first step: bias correction included


@pytest.mark.parametrize(
    ("dtype", "announced"), [("float32", 1), pytest.param("bfloat16", 1, marks=pytest.mark.proof), ("float32", 0)]
)
def test_both_roles_go_on_bitwise_after_a_load_and_around_an_offload(
    folder: Path, tmp_path: Path, batch: TrainBatch, dtype: str, announced: int
) -> None:
    """Also where the actor waited without an option that says so."""
    waiting = PPO.model_copy(update={"num_critic_only_steps": announced})
    engine, loaded = (make_engine(folder, algorithm=waiting, max_tokens_per_gpu=120, dtype=dtype) for _ in range(2))
    store = open_store(str(tmp_path))
    engine.train(batch, num_steps=1, expected_version=0, input_digest="d", train_actor=False)
    engine.train(batch, num_steps=1, expected_version=1, input_digest="d")
    engine.save(store, "saved")
    loaded.load(store, "saved")
    engine.offload()
    engine.onload()
    for each in (engine, loaded):
        each.train(batch, num_steps=2, expected_version=2, input_digest="d")
    assert engine.position().state_digest == loaded.position().state_digest
    for one, other in zip(engine.score(batch, "critic"), loaded.score(batch, "critic"), strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(weight.equal(weights_of(loaded)[name]) for name, weight in weights_of(engine).items())
    with pytest.raises(EngineError, match=r"has a critic, but algorithm.advantage_estimator requires none"):
        make_engine(folder).load(store, "saved")


def test_a_critics_broken_gradient_leaves_the_actor_where_it_was_too(folder: Path, batch: TrainBatch) -> None:
    engine = make_engine(folder, algorithm=PPO)
    before = engine.state_digest()
    assert batch.returns is not None
    broken = dataclasses.replace(batch, returns=[np.full_like(batch.returns[0], np.inf), *batch.returns[1:]])
    with pytest.raises(NotFinite, match="value_loss = inf"):
        engine.train(broken, num_steps=1, expected_version=0, input_digest="d")
    assert engine.position().state_digest == before
    engine.train(batch, num_steps=1, expected_version=0, input_digest="d")


def test_what_a_critic_needs_is_named(folder: Path, batch: TrainBatch) -> None:
    with pytest.raises(ValueError, match="advantage_estimator to ppo"):
        make_engine(folder).score(batch, "critic")
    with pytest.raises(ValueError, match="advantage_estimator to ppo"):
        make_engine(folder).train(batch, num_steps=1, expected_version=0, input_digest="d", train_actor=False)
    for name in ("values", "returns"):
        with pytest.raises(ValueError, match=f"the batch has no {name}, which algorithm.advantage_estimator=ppo"):
            make_engine(folder, algorithm=PPO).train(
                dataclasses.replace(batch, **{name: None}), num_steps=1, expected_version=0, input_digest="d"
            )


def test_the_actor_is_given_out_and_not_the_critic(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder, algorithm=PPO)
    engine.export_hf(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.shape == (321, 64)
    assert not any(name.startswith("critic") for name in weights_of(engine))
