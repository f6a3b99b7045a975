"""Log-probs and entropies in chunks, over parts of a vocabulary, with the gradient in place of the logits; against
PyTorch's own functions, in float64 and over the whole."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cairn.engines.training import chunks
from cairn.engines.training.log_probs import LogitSupport
from cairn.engines.training.vocabulary import Part, Softmax, evaluate, read_log_probs
from cairn.engines.types.types import SamplingSupport
from tests.engines.training.ranks import run_ranks

CPU = torch.device("cpu")
ROWS, TOKENS, IDS, K = 13, 11, 50, 3
PADDED = 64
"""Logits on all ranks: the last 14 are padding, and with four ranks nearly all of the last rank's are."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ON_CPU", 4 * IDS)


def draws(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, PADDED, generator=draw, dtype=torch.float64) * 3
    return {
        "logits": logits.to(dtype),
        "rows": torch.randperm(ROWS, generator=draw)[:TOKENS],
        "targets": torch.randint(0, IDS, (TOKENS,), generator=draw),
        "ids": torch.randint(0, IDS, (TOKENS, K), generator=draw),
        "of_log_probs": torch.randn(TOKENS, generator=draw, dtype=torch.float64),
        "of_ids": torch.randn(TOKENS, K, generator=draw, dtype=torch.float64),
        "of_entropies": torch.randn(TOKENS, generator=draw, dtype=torch.float64),
    }


def kept(drawn: dict[str, torch.Tensor]) -> LogitSupport:
    """Every other token is drawn from ten ids, its target and the requested ones among them."""
    draw = np.random.default_rng(0)
    sets = [
        [] if i % 2 else sorted({int(target), *row.tolist(), *draw.integers(0, IDS, 6).tolist()})
        for i, (target, row) in enumerate(zip(drawn["targets"], drawn["ids"], strict=True))
    ]
    return LogitSupport.of([SamplingSupport.of(sets)], CPU)


def combined(drawn: dict[str, torch.Tensor], log_probs: Any, at_ids: Any, entropies: Any) -> torch.Tensor:
    """A scalar that depends on every number with a weight of its own."""
    total = (drawn["of_log_probs"] * log_probs).sum() + (drawn["of_ids"] * at_ids).sum()
    return total + (drawn["of_entropies"] * entropies).sum()


def by_pytorch(drawn: dict[str, torch.Tensor], temperature: float, cut: bool) -> tuple[list[torch.Tensor], Any]:
    """What PyTorch computes over the whole, and its gradient."""
    logits = drawn["logits"].double().requires_grad_()
    x = logits[drawn["rows"], :IDS] / temperature
    if cut:
        support = kept(drawn)
        outside = torch.zeros(x.shape, dtype=torch.bool)
        outside[support.rows.unique()] = True
        outside[support.rows, support.ids] = False
        x = x.masked_fill(outside, -torch.inf)
    log_softmax = x.log_softmax(-1)
    entropies = -(log_softmax.exp() * log_softmax.clamp(min=-1e30)).sum(-1)
    found = [log_softmax.gather(-1, drawn["targets"][:, None])[:, 0], log_softmax.gather(-1, drawn["ids"]), entropies]
    (gradient,) = torch.autograd.grad(combined(drawn, *found), logits)
    return [values.detach() for values in found], gradient


def ours(
    drawn: dict[str, torch.Tensor], temperature: float, cut: bool, part: Part, width: int
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The values, the gradient of this part, and the most probable tokens' rows."""
    logits = drawn["logits"][:, part.first : part.first + width].clone().requires_grad_()
    softmax = Softmax(temperature, kept(drawn) if cut else None, drawn["rows"], part)
    with torch.no_grad():
        top = read_log_probs(logits, drawn["targets"], softmax, 4)
    held = logits.clone()
    found = evaluate(held, drawn["targets"], softmax, entropy=True, ids=drawn["ids"])
    assert found.entropies is not None
    values = [found.log_probs, found.at_ids, found.entropies]
    (gradient,) = torch.autograd.grad(combined(drawn, *values), held)
    assert gradient.data_ptr() == held.data_ptr(), "the gradient takes the memory of the logits"
    return [value.detach() for value in values], gradient, top


CASES = list(itertools.product((1.0, 0.7), (False, True)))


@pytest.mark.parametrize(("temperature", "cut"), CASES)
def test_values_and_gradients_are_those_of_pytorch(temperature: float, cut: bool) -> None:
    drawn = draws()
    values, gradient, top = ours(drawn, temperature, cut, Part(size=IDS), PADDED)
    expected, right = by_pytorch(drawn, temperature, cut)
    for found, known in zip(values, expected, strict=True):
        torch.testing.assert_close(found, known, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, right, rtol=0, atol=1e-12)
    assert (gradient[:, IDS:] == 0).all(), "padding of the vocabulary"
    torch.testing.assert_close(top[:, 0], expected[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_entropy_gradient_every_bit_is_that_of_the_whole_computation_in_float32(dtype: torch.dtype) -> None:
    drawn = draws(dtype)
    whole, held = (drawn["logits"][drawn["rows"]].clone().requires_grad_() for _ in range(2))
    x = whole.float() / 0.7
    right = x.gather(-1, drawn["targets"][:, None])[:, 0] - x.logsumexp(-1)
    found = evaluate(logits := held.clone(), drawn["targets"], Softmax(0.7), entropy=True).log_probs
    assert torch.equal(found, right)
    assert torch.equal(found, read_log_probs(whole, drawn["targets"], Softmax(0.7)))
    weights = drawn["of_log_probs"].float()
    expected = torch.autograd.grad((weights * right).sum(), whole)
    assert torch.equal(torch.autograd.grad((weights * found).sum(), logits)[0], expected[0])


@pytest.mark.parametrize(("scale", "mean"), [(6.0, 0.0), (1.0, 100.0), (6.0, -1000.0)])
def test_entropy_in_float32_does_not_cancel(scale: float, mean: float) -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)) * scale + mean
    expected = torch.distributions.Categorical(logits=logits.double()).entropy()
    found = evaluate(logits, torch.zeros(64, dtype=torch.int64), Softmax(1.0), entropy=True).entropies
    assert found is not None
    assert (found.double() - expected).abs().max() < 2e-6


def test_logits_that_something_else_needs_are_not_overwritten_unnoticed() -> None:
    drawn = draws()
    bounded = drawn["logits"].requires_grad_().tanh()  # its own backward pass reads its output
    found = evaluate(bounded, drawn["targets"], Softmax(1.0, rows=drawn["rows"]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.log_probs.sum().backward()


def test_a_micro_batch_without_a_chosen_token_has_a_gradient_of_zero() -> None:
    held = draws()["logits"].requires_grad_().clone()
    nothing = torch.zeros(0, dtype=torch.int64)
    found = evaluate(held, nothing, Softmax(1.0, rows=nothing), entropy=True)
    (gradient,) = torch.autograd.grad(found.log_probs.sum(), held)
    assert (gradient == 0).all()
    assert gradient.shape == (ROWS, PADDED)


def take_part(rank: int, ranks: int, work: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=ranks)
    chunks.CHUNK_ON_CPU = 4 * IDS
    width = PADDED // ranks
    part, report = Part(rank * width, IDS, dist.group.WORLD), []
    for temperature, cut in CASES:
        values, gradient, top = ours(draws(), temperature, cut, part, width)
        report.append([[value.tolist() for value in values], gradient.tolist(), top.tolist()])
    (work / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.proof), 4])
def test_ranks_that_share_a_vocabulary_agree_on_what_one_computes(ranks: int, tmp_path: Path) -> None:
    run_ranks(take_part, ranks, tmp_path, world_size=ranks)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    for case, found in zip(CASES, zip(*reports, strict=True), strict=True):
        values, gradient, top = ours(draws(), *case, Part(size=IDS), PADDED)
        for own, _, rows in found:
            assert (own, rows) == (found[0][0], found[0][2]), "ranks differ"
            for one, known in zip(own, values, strict=True):
                np.testing.assert_allclose(one, known, rtol=0, atol=1e-12)
            np.testing.assert_allclose(rows, top, rtol=0, atol=1e-12)
        joined = np.concatenate([np.array(part) for _, part, _ in found], 1)
        np.testing.assert_allclose(joined, gradient, rtol=0, atol=1e-12)
