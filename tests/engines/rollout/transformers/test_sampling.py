import math

import numpy as np
import pytest
import torch

from cairn.engines.rollout.transformers.batch import sample, uniforms


def splitmix64(seed: int, count: int) -> list[int]:
    """Outputs of java.util.SplittableRandom's generator, as in the reference C code of Vigna (prng.di.unimi.it)."""
    outputs, state, mask = [], seed, 2**64 - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    return outputs


def draws(probs: list[float], count: int, **kwargs: object) -> torch.Tensor:
    """Tokens drawn from one distribution with `count` evenly spread uniform numbers."""
    logits = torch.tensor(probs).log().repeat(count, 1)
    uniform = (torch.arange(count) + 0.5) / count
    return sample(logits, uniform, **kwargs)[0]


def test_uniform_numbers_are_the_outputs_of_splitmix64() -> None:
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]  # published test vector
    for seed in (0, 1234567, 2**64 - 1):
        expected = [((z >> 40) + 1) / 2**24 for z in splitmix64(seed, 50)]
        seeds = np.full(50, seed, dtype=np.uint64)
        assert uniforms(seeds, np.arange(50, dtype=np.uint64)).tolist() == expected


def test_tokens_come_as_often_as_they_are_probable() -> None:
    counts = torch.bincount(draws([0.5, 0.125, 0.375], 8000), minlength=3)
    assert counts.tolist() == [4000, 1000, 3000]


def test_a_token_without_probability_is_never_drawn_even_at_the_ends_of_the_unit_interval() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]]).repeat(2, 1)
    tokens, log_probs, _ = sample(logits, torch.tensor([2.0**-24, 1.0]))
    assert tokens.tolist() == [1, 2]
    assert log_probs.tolist() == pytest.approx([math.log(0.5)] * 2)


def test_top_k_draws_from_the_k_most_probable_and_reports_these_and_the_distribution_over_them() -> None:
    probs = [0.1, 0.4, 0.2, 0.3]
    truncated = (torch.arange(700), torch.ones(700), torch.full((700,), 2))
    counts = torch.bincount(draws(probs, 700, truncated=truncated), minlength=4)
    assert counts.tolist() == [0, 400, 0, 300]
    one = (torch.tensor([0]), torch.ones(1), torch.tensor([2]))
    _, log_probs, part = sample(torch.tensor([probs]).log(), torch.tensor([0.9]), truncated=one)
    assert log_probs.item() == pytest.approx(math.log(0.3 / 0.7))
    assert part is not None
    assert part.tolist() == [[False, True, False, True]]


def test_the_reported_distribution_is_the_one_that_tokens_come_by() -> None:
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(0))
    count = 100_000
    cut = (torch.arange(count), torch.full((count,), 0.8), torch.full((count,), 7))
    uniform = (torch.arange(count) + 0.5) / count
    tokens, log_probs, _ = sample(logits.repeat(count, 1), uniform, torch.full((count,), 0.7), truncated=cut)
    shares = torch.bincount(tokens, minlength=9) / count
    assert 1 < (shares > 0).sum() < 7, "the witness that something was cut off, by top-p and not by top-k"
    assert torch.allclose(shares[tokens].log(), log_probs, atol=1e-3)


def test_top_p_draws_from_the_smallest_set_that_holds_the_mass() -> None:
    for top_p, retained in ((0.35, [1]), (0.45, [1, 3]), (0.75, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
        truncated = (torch.arange(500), torch.full((500,), top_p), torch.full((500,), 4))
        assert sorted(set(draws([0.1, 0.4, 0.2, 0.3], 500, truncated=truncated).tolist())) == retained


def test_rows_are_truncated_one_by_one() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().repeat(3, 1)
    uniform = torch.tensor([0.05, 0.05, 0.05])
    one = (torch.tensor([1]), torch.tensor([1.0]), torch.tensor([1]))
    assert sample(logits, uniform, truncated=one)[0].tolist() == [0, 1, 0]


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]] * 2)
    tokens, log_probs, _ = sample(logits, torch.tensor([1.0, 1.0]), temperature=torch.tensor([0.5, 2.0]))
    expected = [4 / t - math.log(sum(math.exp(x / t) for x in (1, 2, 4))) for t in (0.5, 2.0)]
    assert tokens.tolist() == [2, 2]
    assert log_probs.tolist() == pytest.approx(expected, abs=1e-6)


def test_greedy_rows_take_the_most_probable_token_whatever_the_draw() -> None:
    logits = torch.tensor([0.1, 0.2, 0.7]).log().repeat(2, 1)
    tokens, log_probs, _ = sample(logits, torch.tensor([0.01, 0.01]), greedy=torch.tensor([True, False]))
    assert tokens.tolist() == [2, 0]
    assert log_probs.tolist() == pytest.approx([math.log(0.7), math.log(0.1)])
