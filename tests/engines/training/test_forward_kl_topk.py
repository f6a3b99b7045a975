"""Distillation over a teacher's most probable tokens: the loss against the whole divergence, and what is scored."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.models.folders import load_causal_lm
from cairn.engines.training.aggregations import Weight
from cairn.engines.training.collate import Tokens, collate_trained
from cairn.engines.training.losses.objective import objective
from cairn.engines.training.top_k import ABSENT, split_rows
from cairn.engines.types.types import TrainBatch
from tests.engines.training.builders import VOCABULARY, cut_vocabulary, make_batch, make_engine, model_folder

ALONE = AlgorithmConfig(loss_type="forward_kl_topk", distillation_topk=VOCABULARY)
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("teacher"), "llama", seed=3)


def distilled(batch: TrainBatch, folder: Path, teacher: Path, k: int) -> TrainBatch:
    """The batch with what the teacher says."""
    algorithm = ALONE.model_copy(update={"distillation_topk": k})
    engine = make_engine(folder, algorithm=algorithm, temperature=TEMPERATURE, teacher=teacher, max_tokens_per_gpu=120)
    return replace(batch, **split_rows(engine.score(batch, "teacher"), k, VOCABULARY))


def trained_tokens(batch: TrainBatch) -> Tokens:
    weights = [Weight(loss=0.3, share=0.3, value=0.3)] * len(batch)
    return collate_trained(batch, range(len(batch)), weights, torch.device("cpu"))


@pytest.mark.parametrize("cut", [False, True], ids=["whole vocabulary", "top-p"])
def test_over_the_whole_vocabulary_it_is_the_divergence_and_its_gradient(cut: bool) -> None:
    batch = cut_vocabulary(make_batch(4)) if cut else make_batch(4)
    draw = torch.Generator().manual_seed(0)
    size = (sum(batch.response_lengths), VOCABULARY)
    possible = torch.ones(size, dtype=torch.bool)
    sets = [ids for support in batch.kept or () for ids in np.split(support.ids, support.counts.cumsum()[:-1])]
    for row, ids in enumerate(sets):
        possible[row] = torch.from_numpy(np.isin(np.arange(VOCABULARY), ids)) if len(ids) else True
    teacher, logits = (torch.randn(size, generator=draw) for _ in range(2))
    said = teacher.double().masked_fill(~possible, -torch.inf).log_softmax(-1)
    top = said.float().clamp(min=ABSENT).sort(descending=True)
    lengths = np.cumsum(batch.response_lengths)[:-1]
    batch = replace(
        batch,
        teacher_top_log_probs=np.split(top.values.numpy(), lengths),
        teacher_top_ids=np.split(top.indices.masked_fill(top.values == ABSENT, 0).int().numpy(), lengths),
    )
    trained = torch.from_numpy(np.concatenate(batch.loss_mask).astype(bool))
    said, possible, logits = said[trained], possible[trained], logits[trained].requires_grad_()
    loss, metrics = objective(logits.clone(), trained_tokens(batch), ALONE, TEMPERATURE)
    (found,) = torch.autograd.grad(loss, logits)
    log_probs = (logits.double() / TEMPERATURE).masked_fill(~possible, -torch.inf).log_softmax(-1)
    divergence = torch.where(possible, said.exp() * (said - log_probs), 0).sum()
    (right,) = torch.autograd.grad(0.3 * divergence, logits)
    assert loss.item() == pytest.approx(0.3 * divergence.item(), rel=1e-5)
    assert torch.allclose(found, right, atol=1e-6)
    assert metrics["teacher_mass"].item() == pytest.approx(0.3 * len(said), rel=1e-5)
    assert metrics["student_mass"].item() == pytest.approx(0.3 * len(said), rel=1e-5)


def test_with_fewer_tokens_the_gradient_leaves_out_what_the_teacher_holds_elsewhere(
    folder: Path, teacher: Path
) -> None:
    """m π - p 1[v in S] by the logits of temperature 1, as verl's kernel says; beside a policy loss too."""
    k = 5
    tokens = trained_tokens(distilled(make_batch(4, old=True), folder, teacher, k))
    draw = torch.Generator().manual_seed(0)
    assert tokens.teacher_top_log_probs is not None
    assert tokens.teacher_top_ids is not None
    logits = torch.randn(len(tokens.targets), VOCABULARY, generator=draw)
    # So that the policy holds more of every other token's five than the teacher, and the loss is below 0.
    logits[::2] = logits[::2].scatter(-1, tokens.teacher_top_ids[::2], 9 + tokens.teacher_top_log_probs[::2])
    logits.requires_grad_()
    p = tokens.teacher_top_log_probs.exp()
    expected = p.sum(-1, keepdim=True) * logits.softmax(-1)
    expected = 0.3 * expected.scatter_add(-1, tokens.teacher_top_ids, -p)
    added = AlgorithmConfig(distillation_loss_coef=0.5, distillation_topk=k)
    for algorithm, without, weight in ((ALONE, None, 1.0), (added, AlgorithmConfig(), 0.5)):
        loss, metrics = objective(logits.clone(), tokens, algorithm, 1)
        (found,) = torch.autograd.grad(loss, logits)
        if without is not None:
            found -= torch.autograd.grad(objective(logits.clone(), tokens, without, 1)[0], logits)[0]
            assert metrics["distillation_loss"].item() * 0.5 == pytest.approx(
                loss.item() - metrics["pg_loss"].item(), abs=1e-5
            )
        assert torch.allclose(found, weight * expected, atol=1e-6)
        assert 0 < metrics["teacher_mass"].item() < 0.3 * len(p)


def test_a_teacher_says_its_most_probable_tokens_of_what_each_was_drawn_from(folder: Path, teacher: Path) -> None:
    k, batch = 7, cut_vocabulary(make_batch(6))
    found, model = distilled(batch, folder, teacher, k), load_causal_lm(teacher, torch.float32)
    fewer = 0
    for i, support in enumerate(batch.kept or ()):
        ids, length = torch.from_numpy(batch.input_ids[i].astype(np.int64)), batch.response_lengths[i]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, -length - 1 : -1] / TEMPERATURE
        for place in range(length):
            own = support.at(np.array([place])).ids if support.counts[place] else np.arange(VOCABULARY)
            log_probs = logits[place, own].log_softmax(-1).numpy()
            order, count = np.argsort(-log_probs)[:k], min(k, len(own))
            fewer += count < k
            assert found.teacher_top_ids is not None
            assert found.teacher_top_log_probs is not None
            assert found.teacher_log_probs is not None
            assert found.teacher_top_ids[i][place].tolist() == [*own[order], *[0] * (k - count)]
            said = found.teacher_top_log_probs[i][place]
            np.testing.assert_allclose(said[:count], log_probs[order], atol=5e-6)
            assert (said[count:] == np.float32(ABSENT)).all()
            token = batch.input_ids[i][len(ids) - length + place]
            assert found.teacher_log_probs[i][place] == pytest.approx(float(log_probs[own == token][0]), abs=5e-6)
    assert fewer


def test_tokens_that_the_tokenizer_does_not_know_are_left_out() -> None:
    (row,) = split_rows([np.array([[-1, -0.5, -2, 9, 4]], np.float32)], 2, vocabulary=9)["teacher_top_log_probs"]
    assert row.tolist() == [[np.float32(ABSENT), -2]]
