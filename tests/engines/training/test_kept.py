"""Training on what was sampled by top-p and top-k is unbiased, since log-probs are those of what could be drawn."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.rollout.transformers.batch import sample
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.training.collate import Tokens
from cairn.engines.training.log_probs import LogitSupport, outside_support
from cairn.engines.training.losses.objective import objective
from cairn.engines.training.vocabulary import Softmax, evaluate
from cairn.engines.types.types import SamplingParams, SamplingSupport, TrainBatch
from tests.engines.rollout.models import rollout_config
from tests.engines.training.builders import VOCABULARY, make_batch, make_engine, sampled_tokens
from tests.requests import group

CUT = {"top_p": 0.8, "top_k": 200}
CPU = torch.device("cpu")


def drawn_from(logits: torch.Tensor, top_p: float, top_k: int) -> SamplingSupport:
    """What the sampler would draw from, for each row."""
    rows = torch.arange(len(logits))
    cut = (rows, torch.full((len(rows),), top_p), torch.full((len(rows),), top_k))
    _, _, part = sample(logits.float(), torch.full((len(rows),), 0.5), truncated=cut)
    assert part is not None
    return SamplingSupport.of([row.nonzero()[:, 0].numpy() for row in part])


@pytest.mark.parametrize(("top_p", "top_k"), [(0.95, 50), (0.8, 50), (1.0, 5), (0.9, 6)])
def test_the_expected_gradient_of_a_log_prob_over_the_samplers_own_draws_is_zero(top_p: float, top_k: int) -> None:
    """Exact, over every token of a vocabulary of fifty: Σ q(a) ∇ log π(a), with q what the sampler draws by."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    support = drawn_from(logits, top_p, top_k)
    assert 1 < support.counts[0] < 50
    probs = torch.zeros(50, dtype=torch.float64)
    probs[support.ids] = logits[0].softmax(-1)[support.ids]
    probs /= probs.sum()

    def expected_gradient(support: LogitSupport | None) -> float:
        policy = logits.clone().requires_grad_()
        ids = torch.arange(50)[None]
        log_probs = evaluate(policy.clone(), ids[:, 0], Softmax(1.0, support), ids=ids).at_ids[0]
        (gradient,) = torch.autograd.grad((probs[probs > 0] * log_probs[probs > 0]).sum(), policy)
        return float(gradient.abs().sum())

    assert expected_gradient(LogitSupport.of([support], CPU)) < 1e-14
    assert expected_gradient(None) > 0.05, "the witness: scored over the whole vocabulary it is not"


def test_log_probs_and_entropy_are_those_of_the_softmax_over_what_was_kept() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = [SamplingSupport.of([[1, 4]]), SamplingSupport.whole(1), SamplingSupport.of([[0, 2, 5, 6]])]
    support = LogitSupport.of(parts, CPU)
    kept = [[1, 4], list(range(7)), [0, 2, 5, 6]]
    targets = torch.tensor([4, 3, 5])

    found = evaluate(logits, targets, Softmax(1.0, support), entropy=True)
    assert found.entropies is not None
    expected = torch.zeros(2, 3, dtype=torch.float64)
    for row, (ids, target) in enumerate(zip(kept, targets.tolist(), strict=True)):
        log_probs = logits[row, ids].log_softmax(-1)
        expected[:, row] = torch.stack([log_probs[ids.index(target)], -(log_probs.exp() * log_probs).sum()])
    torch.testing.assert_close(torch.stack([found.log_probs, found.entropies]), expected, rtol=0, atol=1e-12)


def test_each_rank_of_a_vocabulary_hides_its_own_part() -> None:
    logits = torch.randn(2, 10, generator=torch.Generator().manual_seed(0))
    support = LogitSupport.of([SamplingSupport.of([[0, 9], [6]])], CPU)
    parts = [outside_support(support, logits[:, first : first + 5], first) for first in (0, 5)]
    right = torch.ones(2, 10, dtype=torch.bool)
    right[0, [0, 9]] = right[1, 6] = False
    assert torch.equal(torch.cat(parts, 1), right)


def test_what_was_kept_follows_the_tokens_that_are_picked_and_joined() -> None:
    first, second = SamplingSupport.of([[3, 1], [], [7, 5, 6]]), SamplingSupport.of([[2]])
    joined = first + second
    assert len(joined) == 4
    picked = joined.at(np.array([0, 2, 3]))
    assert picked.ids.tolist() == [1, 3, 5, 6, 7, 2]
    assert picked.counts.tolist() == [2, 3, 1]
    there = LogitSupport.of([first, second], CPU).at(torch.tensor([1, 2]), 4)
    assert (there.rows.tolist(), there.ids.tolist()) == ([1, 1, 1], [5, 6, 7])
    pieces = LogitSupport.of([first, second], CPU).split([0, 2, 3, 4])
    assert [(piece.rows.tolist(), piece.ids.tolist()) for piece in pieces] == [
        ([0, 0], [1, 3]),
        ([0, 0, 0], [5, 6, 7]),
        ([0], [2]),
    ]
    assert joined.first_without(np.array([3, 99, 6, 2])) is None
    assert joined.first_without(np.array([3, 99, 4, 2])) == 2


@pytest.fixture(scope="module")
def sampled(folder: Path) -> TrainBatch:
    """What the rollout engine samples by top-p and top-k, with what it reports."""
    engine = TransformersEngine(str(folder), rollout_config())
    draw = np.random.default_rng(0)
    params = SamplingParams(24, temperature=0.8, return_sampling_support=True, **CUT)
    prompts = [draw.integers(VOCABULARY, size=5 + i).tolist() for i in range(4)]
    requests = [one for i, prompt in enumerate(prompts) for one in group(i, prompt, (1, 2, 3), params)]
    done = [c for part in engine.generate(requests) for c in part]
    assert all(c.kept is not None and len(c.kept) == len(c.response_ids) for c in done)
    counts = np.concatenate([c.kept.counts for c in done if c.kept is not None])
    assert counts.min() > 1
    assert counts.max() < VOCABULARY
    return dataclasses.replace(sampled_tokens(prompts, done, draw), kept=[c.kept for c in done if c.kept is not None])


def test_on_policy_ratios_are_one(folder: Path, sampled: TrainBatch) -> None:
    algorithm = AlgorithmConfig(use_kl_loss=True)
    engine = make_engine(folder, algorithm=algorithm, temperature=0.8, max_tokens_per_gpu=120)
    old = engine.score(sampled, "actor")
    for role in ("actor", "ref"):
        for scored, reported in zip(engine.score(sampled, role), sampled.rollout_log_probs or [], strict=True):  # type: ignore[arg-type]
            assert np.abs(np.exp(scored - reported) - 1).max() < 2e-6
    batch = dataclasses.replace(sampled, old_log_probs=old, ref_log_probs=engine.score(sampled, "ref"))
    metrics = engine.train(batch, num_steps=1, expected_version=0, input_digest="d").metrics
    assert abs(metrics["ppo_kl"]) < 1e-6
    assert metrics["kl_loss"] < 1e-12
    assert metrics["train_rollout_logprob_abs_diff_max"] < 2e-6


def test_a_batch_that_does_not_say_what_was_kept_would_show_it(folder: Path, sampled: TrainBatch) -> None:
    engine = make_engine(folder, temperature=0.8)
    whole = engine.score(dataclasses.replace(sampled, kept=None), "actor")
    apart = np.concatenate(sampled.rollout_log_probs or []) - np.concatenate(whole)
    assert apart.mean() > 0.1


def test_a_token_outside_of_what_it_was_drawn_from_is_refused(folder: Path, sampled: TrainBatch) -> None:
    assert sampled.kept is not None
    other = [(int(ids[-1]) + 1) % VOCABULARY for ids in sampled.input_ids[:1]]
    last = len(sampled.kept[0]) - 1
    wrong = sampled.kept[0].at(np.arange(last)) + SamplingSupport.of([other])
    batch = dataclasses.replace(sampled, kept=[wrong, *sampled.kept[1:]])
    with pytest.raises(ValueError, match=f"response token {last} of sample 0 is not among those it was drawn from"):
        make_engine(folder).score(batch, "actor")


def test_the_whole_loss_is_that_of_the_smaller_vocabulary() -> None:
    """Where every token was drawn from the same ids, loss and metrics are those of a model that knows no others."""
    draw = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(6, 9, generator=draw), torch.tensor([0, 3, 4, 8])
    targets = torch.tensor([0, 1, 2, 3, 1, 0])
    fields = {
        name: torch.randn(6, generator=draw) * 0.3 - 1.4
        for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs")
    }
    fields |= {"advantages": torch.randn(6, generator=draw), "weights": torch.full((6,), 1 / 8)}
    fields |= {"shares": torch.full((6,), 1 / 6)}
    places = torch.zeros(6, dtype=torch.int64)
    fields |= {"samples": places, "groups": places[:1], "counts": torch.tensor([6.0])}
    support = LogitSupport.of([SamplingSupport.of([ids.tolist()] * 6)], CPU)
    algorithm = AlgorithmConfig(entropy_coef=0.1, use_kl_loss=True, kl_loss_coef=0.1, use_tis=True)
    cut = objective(logits, Tokens(places, places, ids[targets], kept=support, **fields), algorithm, 0.9)
    small = objective(logits[:, ids], Tokens(places, places, targets, **fields), algorithm, 0.9)
    assert cut[0].item() == pytest.approx(small[0].item(), abs=1e-6)
    assert {name: value.item() for name, value in cut[1].items()} == pytest.approx(
        {name: value.item() for name, value in small[1].items()}, abs=1e-6
    )


def test_a_batch_of_which_a_part_was_cut_scores_the_rest_as_before(folder: Path) -> None:
    batch = make_batch(4)
    engine = make_engine(folder)
    cut = [SamplingSupport.of([[int(token), 5, 300] for token in batch.input_ids[0][-batch.response_lengths[0] :]])]
    support = cut + [SamplingSupport.whole(length) for length in batch.response_lengths[1:]]
    before, after = engine.score(batch, "actor"), engine.score(dataclasses.replace(batch, kept=support), "actor")
    assert all(np.array_equal(one, other) for one, other in zip(before[1:], after[1:], strict=True))
    assert (after[0] > before[0]).all()
