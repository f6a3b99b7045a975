import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.models.folders import load_causal_lm
from cairn.engines.models.published import published_weights
from cairn.engines.training.torch.engine import TorchEngine
from cairn.engines.types.errors import BadModel, EngineError, NotFinite, WrongVersion
from cairn.engines.types.types import TrainBatch
from tests.engines.training.builders import VOCABULARY, make_batch, make_engine, model_folder, part_of, weights_of

EPS = 1e-5  # of Adam, large enough for a gradient near zero not to turn its rounding into a step of full size

FULL = AlgorithmConfig(
    eps_clip=0.2,
    eps_clip_high=0.28,
    eps_clip_c=3.0,
    entropy_coef=0.01,
    use_kl_loss=True,
    kl_loss_coef=0.05,
    kl_loss_type="k3",
    use_tis=True,
    tis_clip=1.5,
    tis_clip_low=0.5,
)


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    return make_batch(old=True, rollout=True, ref=True)


def train(engine: TorchEngine, batch: TrainBatch, steps: int = 1) -> dict[str, float]:
    version = engine.position().weight_version
    return engine.train(batch, num_steps=steps, expected_version=version, input_digest="d").metrics


def reference_update(
    folder: Path, batch: TrainBatch, algorithm: AlgorithmConfig, temperature: float, updates: int
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """The same updates written out with loops: one sequence at a time, unpadded, in plain PyTorch."""
    model = load_causal_lm(folder, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=EPS, weight_decay=0.0)
    history = []
    samples = batch.samples or list(range(len(batch)))
    of_sample: dict[int, int] = defaultdict(int)
    for sample, mask in zip(samples, batch.loss_mask, strict=True):
        of_sample[sample] += int(mask.sum())
    for _ in range(updates):
        optimizer.zero_grad()
        total, metrics = torch.tensor(0.0), dict.fromkeys(("pg_loss", "entropy_loss", "kl_loss", "ppo_kl", "tis"), 0.0)
        tokens = sum(int(mask.sum()) for mask in batch.loss_mask)
        for i, ids in enumerate(batch.input_ids):
            length, mask = batch.response_lengths[i], torch.from_numpy(batch.loss_mask[i]).float()
            logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0, -length - 1 : -1]
            table = torch.log_softmax(logits / temperature, -1)
            logp = table[torch.arange(length), torch.from_numpy(ids[-length:].astype(np.int64))]
            assert batch.advantages is not None
            assert batch.old_log_probs is not None
            assert batch.rollout_log_probs is not None
            assert batch.ref_log_probs is not None
            advantage = torch.from_numpy(batch.advantages[i])
            old, rollout, ref = (
                torch.from_numpy(field[i])
                for field in (batch.old_log_probs, batch.rollout_log_probs, batch.ref_log_probs)
            )
            ratio = (logp - old).exp()
            pg = torch.max(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage)
            pg = torch.where(advantage < 0, torch.min(pg, -3.0 * advantage), pg)
            tis = (old - rollout).exp()
            pg = pg * tis.clamp(0.5, 1.5)
            kl = torch.exp(ref - logp) - 1 - (ref - logp)
            if algorithm.use_tis:
                kl = kl * (logp.detach() - rollout).exp()
            entropy = -(table.exp() * table).sum(-1)
            of_mean = 1 / (len(of_sample) * max(1, of_sample[samples[i]]))
            mean = 1 / tokens if algorithm.calculate_per_token_loss else of_mean
            constant = algorithm.loss_scale_factor
            scale = mean if constant is None else 1 / (len(of_sample) * constant)
            per_token = pg - algorithm.entropy_coef * entropy + algorithm.kl_loss_coef * kl
            total = total + (per_token * mask).sum() * scale
            metrics["pg_loss"] += ((pg * mask).sum() * scale).item()
            for name, value in (("entropy_loss", entropy), ("kl_loss", kl), ("tis", tis)):
                metrics[name] += ((value * mask).sum() * mean).item()
            metrics["ppo_kl"] += (((old - logp) * mask).sum() * mean).item()
        total.backward()
        metrics["loss"] = total.item()
        metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        history.append(metrics)
    return published_weights(model), history


AGGREGATIONS = [{}, {"calculate_per_token_loss": True}, {"loss_scale_factor": 12}]
FANNED = [0, 1, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7]
"""Which of 8 samples each of 12 sequences is of."""


@pytest.mark.parametrize("samples", [None, FANNED])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_updates_equal_those_written_out_in_plain_pytorch(
    folder: Path, batch: TrainBatch, aggregation: dict[str, object], temperature: float, samples: list[int] | None
) -> None:
    batch, algorithm = dataclasses.replace(batch, samples=samples), FULL.model_copy(update=aggregation)
    expected, history = reference_update(folder, batch, algorithm, temperature, updates=3)
    engine = make_engine(folder, algorithm=algorithm, temperature=temperature, max_tokens_per_gpu=150, adam_eps=EPS)
    for metrics in history:
        found = train(engine, batch)
        assert {name: found[name] for name in metrics} == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    for name, weight in weights_of(engine).items():
        assert torch.allclose(weight, expected[name], atol=1e-5), name


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])
def test_other_architectures_train_alike_and_without_dropout(tmp_path: Path, batch: TrainBatch, family: str) -> None:
    folder = model_folder(tmp_path / family, family)
    expected, history = reference_update(folder, batch, FULL, 1.0, updates=2)
    engine = make_engine(folder, algorithm=FULL, max_tokens_per_gpu=150, adam_eps=EPS)
    assert [train(engine, batch)["loss"] for _ in history] == pytest.approx([m["loss"] for m in history], rel=1e-4)
    for name, weight in weights_of(engine).items():
        assert torch.allclose(weight, expected[name], atol=1e-5), name


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_change_nothing_but_rounding(
    folder: Path, batch: TrainBatch, aggregation: dict[str, object]
) -> None:
    algorithm = FULL.model_copy(update=aggregation)
    whole = make_engine(folder, algorithm=algorithm, adam_eps=EPS)
    cut = make_engine(folder, algorithm=algorithm, adam_eps=EPS, max_tokens_per_gpu=70)
    assert train(cut, batch) == pytest.approx(train(whole, batch), rel=1e-4, abs=1e-6)
    for name, weight in weights_of(whole).items():
        assert torch.allclose(weight, weights_of(cut)[name], atol=1e-5), name


def test_recomputed_activations_give_the_same_update(folder: Path, batch: TrainBatch) -> None:
    stored, recomputed = make_engine(folder), make_engine(folder, gradient_checkpointing=True)
    passes: list[TorchEngine] = []
    for engine in (stored, recomputed):
        layer = engine._model.get_submodule("model.layers.0.mlp")
        layer.register_forward_pre_hook(lambda *_, engine=engine: passes.append(engine))
    assert train(stored, batch) == train(recomputed, batch)
    assert [passes.count(engine) for engine in (stored, recomputed)] == [1, 2]
    assert stored.state_digest() == recomputed.state_digest()


def test_a_sample_without_trained_tokens_adds_nothing_but_counts_in_the_mean(folder: Path, batch: TrainBatch) -> None:
    masked = dataclasses.replace(batch, loss_mask=[np.zeros_like(batch.loss_mask[0]), *batch.loss_mask[1:]])
    rest = part_of(batch, slice(1, None))
    with_it, without = (
        train(make_engine(folder, algorithm=FULL), masked),
        train(make_engine(folder, algorithm=FULL), rest),
    )
    share = (len(batch) - 1) / len(batch)
    assert with_it["loss"] == pytest.approx(share * without["loss"], rel=1e-5)
    assert with_it["grad_norm"] == pytest.approx(share * without["grad_norm"], rel=1e-4)


def test_what_the_world_gave_is_attended_to_and_weighs_nothing(folder: Path, batch: TrainBatch) -> None:
    def trained(changed: TrainBatch) -> str:
        engine = make_engine(folder, algorithm=FULL)
        train(engine, changed)
        return engine.state_digest()

    masked, rng = [np.flatnonzero(mask == 0) for mask in batch.loss_mask], np.random.default_rng(5)

    def with_changed(values: Sequence[np.ndarray]) -> list[np.ndarray]:
        made = [one.copy() for one in values]
        for one, places in zip(made, masked, strict=True):
            one[places] = rng.normal(size=len(places))
        return made

    names = ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs")
    otherwise = {name: with_changed(getattr(batch, name)) for name in names}
    assert any(len(places) for places in masked)
    assert trained(dataclasses.replace(batch, **otherwise)) == trained(batch)

    sample = next(i for i, places in enumerate(masked) if len(places) and batch.loss_mask[i][places[0] + 1 :].any())
    ids = [one.copy() for one in batch.input_ids]
    place = len(ids[sample]) - batch.response_lengths[sample] + masked[sample][0]
    ids[sample][place] = (ids[sample][place] + 1) % VOCABULARY
    assert trained(dataclasses.replace(batch, input_ids=ids)) != trained(batch)


def test_a_step_without_trained_tokens_is_refused_before_anything_changes(folder: Path, batch: TrainBatch) -> None:
    masks = [mask * (i < 6) for i, mask in enumerate(batch.loss_mask)]
    engine = make_engine(folder)
    before = engine.position()
    with pytest.raises(ValueError, match=r"optimizer step 2 of 2 has no trained token.*6 to 11"):
        train(engine, dataclasses.replace(batch, loss_mask=masks), steps=2)
    assert engine.position() == before


def test_several_steps_are_contiguous_parts_of_the_batch_in_order(folder: Path, batch: TrainBatch) -> None:
    together, apart = make_engine(folder), make_engine(folder)
    result = together.train(batch, num_steps=3, expected_version=0, input_digest="d")
    parts = []
    for start in range(0, 12, 4):
        parts.append(train(apart, part_of(batch, slice(start, start + 4))))
    assert together.state_digest() == apart.state_digest()
    assert result.weight_version == 3
    assert result.metrics["loss"] == pytest.approx(sum(part["loss"] for part in parts) / 3)


def test_a_step_has_its_share_of_the_samples_with_all_sequences_of_each(folder: Path, batch: TrainBatch) -> None:
    together, apart = make_engine(folder), make_engine(folder)
    result = together.train(
        dataclasses.replace(batch, samples=FANNED), num_steps=2, expected_version=0, input_digest="d"
    )
    for span, own in ((slice(7), FANNED[:7]), (slice(7, 12), [0, 1, 1, 2, 3])):
        train(apart, dataclasses.replace(part_of(batch, span), samples=own))
    assert together.state_digest() == apart.state_digest()
    assert result.weight_version == 2
    with pytest.raises(ValueError, match="8 samples cannot be cut into 3 optimizer steps"):
        train(together, dataclasses.replace(batch, samples=FANNED), steps=3)


@pytest.mark.parametrize("samples", [[1, *FANNED[1:]], [*FANNED[:-1], 8], [*FANNED[:-1], 2]])
def test_samples_that_are_not_counted_one_after_the_other_are_refused(
    folder: Path, batch: TrainBatch, samples: list[int]
) -> None:
    engine = make_engine(folder)
    with pytest.raises(ValueError, match="samples does not count the samples from 0"):
        train(engine, dataclasses.replace(batch, samples=samples))
    with pytest.raises(ValueError, match="samples has 11 entries for 12 sequences"):
        train(engine, dataclasses.replace(batch, samples=FANNED[:-1]))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_tokens_that_are_masked_leave_the_others_their_weight(
    folder: Path, batch: TrainBatch, aggregation: dict[str, Any]
) -> None:
    """As if their advantages were 0, which has no gradient either."""
    algorithm = AlgorithmConfig(**aggregation)
    assert batch.advantages is not None
    left = [mask * (np.arange(len(mask)) % 3 > 0).astype(np.uint8) for mask in batch.loss_mask]
    left[2] = np.zeros_like(left[2])
    masked = dataclasses.replace(batch, loss_mask=left, divisor_mask=batch.loss_mask)
    unpaid = dataclasses.replace(batch, advantages=[a * m for a, m in zip(batch.advantages, left, strict=True)])
    engines = [make_engine(folder, algorithm=algorithm) for _ in range(2)]
    for engine, trained_on in zip(engines, (masked, unpaid), strict=True):
        train(engine, trained_on)
    for name, tensor in weights_of(engines[1]).items():
        torch.testing.assert_close(weights_of(engines[0])[name], tensor, rtol=0, atol=1e-6)


def test_without_old_log_probs_the_current_policy_stands_in_for_one_step_only(folder: Path, batch: TrainBatch) -> None:
    scorer, scored_before, own = make_engine(folder), make_engine(folder), make_engine(folder)
    scored = dataclasses.replace(batch, old_log_probs=scorer.score(batch, "actor"))
    unscored = dataclasses.replace(batch, old_log_probs=None)
    expected, found = train(scored_before, scored), train(own, unscored)
    assert found["ppo_kl"] == found["pg_clipfrac"] == 0.0
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    with pytest.raises(ValueError, match=r"no old_log_probs.*score the batch first"):
        train(own, unscored, steps=2)


def test_scores_are_the_log_probs_of_each_sample_alone(folder: Path, tmp_path: Path, batch: TrainBatch) -> None:
    other, teacher = model_folder(tmp_path / "ref", seed=1), model_folder(tmp_path / "teacher", "llama", layers=3)
    algorithm = AlgorithmConfig(use_kl_loss=True, use_opd=True)
    engine = make_engine(folder, algorithm=algorithm, temperature=0.8, ref=other, teacher=teacher)
    empty = dataclasses.replace(batch.__class__(batch.input_ids[:1], [0], [np.zeros(0, np.uint8)]))
    for role, path in (("actor", folder), ("ref", other), ("teacher", teacher)):
        model = load_causal_lm(path, torch.float32)
        for i, found in enumerate(engine.score(batch, role)):  # type: ignore[arg-type]
            ids = torch.from_numpy(batch.input_ids[i].astype(np.int64))
            length = batch.response_lengths[i]
            with torch.no_grad():
                table = torch.log_softmax(model(input_ids=ids[None]).logits[0, -length - 1 : -1] / 0.8, -1)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, table[torch.arange(length), ids[-length:]].numpy(), atol=5e-6)
    assert [len(values) for values in engine.score(empty, "actor")] == [0]


def test_the_reference_stays_what_it_was_and_is_absent_without_a_kl_loss(folder: Path, batch: TrainBatch) -> None:
    engine = make_engine(folder, algorithm=FULL, lr=0.01)
    before = engine.score(batch, "ref")
    train(engine, batch)
    after = engine.score(batch, "ref")
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert not np.array_equal(after[0], engine.score(batch, "actor")[0])
    with pytest.raises(ValueError, match="reference model is not loaded"):
        make_engine(folder).score(batch, "ref")


def test_a_kl_loss_of_weight_zero_is_measured_but_not_trained_on(folder: Path, batch: TrainBatch) -> None:
    measured = make_engine(folder, algorithm=AlgorithmConfig(use_kl_loss=True, kl_loss_type="k2"))
    plain = make_engine(folder)
    metrics = train(measured, batch)
    assert metrics["kl_loss"] > 0
    assert metrics["loss"] == train(plain, batch)["loss"]
    assert measured.weights_checksum() == plain.weights_checksum()


def test_supervised_training_needs_no_advantages_and_is_the_mean_log_likelihood(
    folder: Path, batch: TrainBatch
) -> None:
    plain = TrainBatch(batch.input_ids, batch.response_lengths, batch.loss_mask)
    engine = make_engine(folder, algorithm=AlgorithmConfig(loss_type="sft_loss", calculate_per_token_loss=True))
    scores = np.concatenate(engine.score(plain, "actor"))
    metrics = train(engine, plain, steps=1)
    assert metrics["loss"] == pytest.approx(-scores[np.concatenate(plain.loss_mask) == 1].mean(), rel=1e-5)
    assert train(engine, plain, steps=3)["loss"] < metrics["loss"]


def test_a_batch_without_a_field_its_loss_reads_is_refused(folder: Path, batch: TrainBatch) -> None:
    engine = make_engine(folder, algorithm=FULL)
    for name, why in (
        ("advantages", "policy_loss"),
        ("ref_log_probs", "use_kl_loss"),
        ("rollout_log_probs", "use_tis"),
    ):
        with pytest.raises(ValueError, match=f"no {name}, which algorithm.*{why}"):
            train(engine, dataclasses.replace(batch, **{name: None}))
    strict = make_engine(folder, algorithm=AlgorithmConfig(use_rollout_logprobs=True))
    with pytest.raises(ValueError, match=r"no old_log_probs, which algorithm\.use_rollout_logprobs"):
        train(strict, dataclasses.replace(batch, old_log_probs=None))


def test_fields_of_the_wrong_length_are_refused_by_name(folder: Path, batch: TrainBatch) -> None:
    engine = make_engine(folder)
    assert batch.advantages is not None
    short = dataclasses.replace(batch, advantages=[*batch.advantages[:-1], batch.advantages[-1][:-1]])
    with pytest.raises(ValueError, match="advantages of sample 11"):
        train(engine, short)
    promptless = dataclasses.replace(batch, response_lengths=[len(batch.input_ids[0]), *batch.response_lengths[1:]])
    with pytest.raises(ValueError, match=r"sample 0 has .* prompt must not be empty"):
        train(engine, promptless)


def test_an_update_that_expects_another_version_is_refused_untouched(folder: Path, batch: TrainBatch) -> None:
    engine = make_engine(folder)
    train(engine, batch, steps=2)
    before = engine.position()
    with pytest.raises(WrongVersion, match="at weight version 2, not at 1"):
        engine.train(batch, num_steps=1, expected_version=1, input_digest="other")
    assert engine.position() == before


def test_the_position_tells_which_input_was_trained_last_and_with_what_result(folder: Path, batch: TrainBatch) -> None:
    engine = make_engine(folder)
    start = engine.position()
    assert (start.weight_version, start.last_input_digest, start.last_result) == (0, None, None)
    result = engine.train(batch, num_steps=2, expected_version=0, input_digest="abc")
    position = engine.position()
    assert (position.weight_version, position.last_input_digest, position.last_result) == (2, "abc", result)
    assert position.state_digest == result.state_digest != start.state_digest
    assert result.tokens == sum(map(len, batch.input_ids))


@pytest.mark.parametrize("field", ["advantages", "old_log_probs"])
def test_a_loss_that_is_no_number_is_refused_before_the_step(folder: Path, batch: TrainBatch, field: str) -> None:
    values = getattr(batch, field)
    broken = dataclasses.replace(batch, **{field: [np.full_like(values[0], np.nan), *values[1:]]})
    engine, untouched = make_engine(folder), make_engine(folder)
    before = engine.position()
    with pytest.raises(NotFinite, match=r"loss = nan.*grad_norm = nan.*weights are unchanged"):
        train(engine, broken)
    assert engine.position() == before
    train(engine, batch)
    train(untouched, batch)
    assert engine.state_digest() == untouched.state_digest()


def test_a_failure_between_two_steps_leaves_an_engine_that_must_be_restored(folder: Path, batch: TrainBatch) -> None:
    assert batch.advantages is not None
    broken = dataclasses.replace(batch, advantages=[*batch.advantages[:-1], np.full_like(batch.advantages[-1], np.inf)])
    engine = make_engine(folder)
    with pytest.raises(NotFinite):
        train(engine, broken, steps=2)
    assert not engine.health()["intact"]
    for call in (engine.position, lambda: engine.score(batch, "actor"), lambda: train(engine, batch)):
        with pytest.raises(EngineError, match=r"interrupted in train\(\).*load a checkpoint"):
            call()


def test_the_gradient_is_clipped_to_its_global_norm(folder: Path, batch: TrainBatch) -> None:
    # Adam's first step is the gradient's sign unless its epsilon is large: then it is proportional to the gradient.
    free, clipped = (make_engine(folder, adam_eps=1e2, lr=1e4, clip_grad=limit) for limit in (0.0, 0.01))
    before = weights_of(free)
    norm = train(free, batch)["grad_norm"]
    assert train(clipped, batch)["grad_norm"] == norm > 0.01
    name = "model.layers.0.mlp.up_proj.weight"
    moved = weights_of(free)[name] - before[name]
    assert torch.allclose(weights_of(clipped)[name] - before[name], moved * (0.01 / norm), rtol=1e-2, atol=1e-7)


def test_the_learning_rate_follows_the_weight_version(folder: Path, batch: TrainBatch) -> None:
    engine = make_engine(folder, lr=1.0, lr_warmup_iters=2, lr_decay_style="linear", total_steps=6, adam_eps=1e9)
    assert [train(engine, batch)["lr"] for _ in range(4)] == pytest.approx([0.5, 1.0, 1.0, 0.75])


def test_metrics_have_slimes_names(folder: Path, batch: TrainBatch) -> None:
    always = {"loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "grad_norm", "lr"}
    bare = dataclasses.replace(batch, rollout_log_probs=None)
    assert set(train(make_engine(folder), bare)) == always
    mismatch = {"train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max"}
    optional = mismatch | {"kl_loss", "tis", "tis_clipfrac", "ois"}
    assert set(train(make_engine(folder, algorithm=FULL), batch)) == always | optional


def test_the_mismatch_metric_compares_the_current_policy_where_the_rollouts_log_probs_are_the_old_ones(
    folder: Path, batch: TrainBatch
) -> None:
    batch = dataclasses.replace(batch, old_log_probs=batch.rollout_log_probs)
    engine = make_engine(folder, algorithm=AlgorithmConfig(use_rollout_logprobs=True), max_tokens_per_gpu=40)
    scores = engine.score(batch, "actor")
    assert batch.rollout_log_probs is not None
    differences = [
        np.abs(a - b)[mask == 1] for a, b, mask in zip(scores, batch.rollout_log_probs, batch.loss_mask, strict=True)
    ]
    metrics = train(engine, batch)
    mean = np.mean([difference.mean() for difference in differences])
    largest = max(difference.max() for difference in differences)
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(mean, rel=1e-4)
    assert metrics["train_rollout_logprob_abs_diff_max"] == pytest.approx(largest, rel=1e-4)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_master_weights(folder: Path, batch: TrainBatch) -> None:
    exact, half = make_engine(folder, lr=1e-5), make_engine(folder, lr=1e-5, dtype="bfloat16")
    model = load_causal_lm(folder, torch.bfloat16)
    ids, length = torch.from_numpy(batch.input_ids[0].astype(np.int64)), batch.response_lengths[0]
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=ids[None]).logits[0, -length - 1 : -1].float(), -1)
    first = TrainBatch(batch.input_ids[:1], batch.response_lengths[:1], batch.loss_mask[:1])
    found = half.score(first, "actor")[0]
    np.testing.assert_array_equal(found, table[torch.arange(length), ids[-length:]].numpy())
    before = half.state_digest()
    expected, metrics = train(exact, batch), train(half, batch)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=0.05)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    assert half.state_digest() != before  # steps of 1e-5 are far below bfloat16's resolution
    assert {tensor.dtype for tensor in weights_of(half).values()} == {torch.bfloat16}


def test_a_bfloat16_actor_and_its_reference_agree_bitwise_at_the_start(folder: Path, batch: TrainBatch) -> None:
    engine = make_engine(folder, algorithm=AlgorithmConfig(use_kl_loss=True), dtype="bfloat16")
    for actor, ref in zip(engine.score(batch, "actor"), engine.score(batch, "ref"), strict=True):
        np.testing.assert_array_equal(actor, ref)


def test_a_folder_that_holds_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="does not exist"):
        make_engine(tmp_path / "absent")


def test_the_loss_of_a_uniform_policy_is_known_in_closed_form(folder: Path, tmp_path: Path, batch: TrainBatch) -> None:
    model = load_causal_lm(folder, torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    model.save_pretrained(tmp_path)
    engine = make_engine(tmp_path, algorithm=AlgorithmConfig(loss_type="sft_loss"))
    assert train(engine, batch)["loss"] == pytest.approx(math.log(321), rel=1e-6)


def test_with_moments_reset_an_iteration_is_that_of_a_new_optimizer(folder: Path, tmp_path: Path) -> None:
    """Two steps each: from the second iteration's weights on, a fresh engine does the same."""
    batch = make_batch(old=True)
    engine = make_engine(folder, reset_optimizer_states=True)
    engine.train(batch, num_steps=2, expected_version=0, input_digest="first")
    engine.export_hf(tmp_path)
    fresh = make_engine(tmp_path)
    fresh.train(batch, num_steps=2, expected_version=0, input_digest="second")
    engine.train(batch, num_steps=2, expected_version=2, input_digest="second")
    assert engine.weights_checksum() == fresh.weights_checksum()
    second = make_engine(folder)
    for version in (0, 2):
        second.train(batch, num_steps=2, expected_version=version, input_digest="d")
    assert second.weights_checksum() != engine.weights_checksum()
