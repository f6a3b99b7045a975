"""The losses that follow advantages, against their formulas, each written anew sample by sample."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens
from cairn.engines.training.losses import dppo_kl
from cairn.engines.training.losses.objective import loss_and_metrics
from tests.engines.training.builders import make_batch
from tests.engines.training.ragged import Response, batch_of, responses, tokens_of

BATCH = make_batch(9, old=True)
CLIPS = {"eps_clip": 0.1, "eps_clip_high": 0.15}
Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
OUTSIDE = f"{Path(__file__).parent / 'gspo.py'}:loss"
"""GSPO with advantages averaged over the response and a ratio that is differentiated through all of its tokens."""


def near(tokens: Tokens, spread: float = 0.3, seed: int = 0) -> torch.Tensor:
    """[T] log-probs of a policy that has moved."""
    assert tokens.old_log_probs is not None
    draw = torch.Generator().manual_seed(seed)
    moved = torch.randn(len(tokens.old_log_probs), generator=draw, dtype=torch.float64)
    return (tokens.old_log_probs.double() + spread * moved).requires_grad_()


def of(algorithm: AlgorithmConfig, log_probs: torch.Tensor, tokens: Tokens) -> tuple[float, torch.Tensor]:
    """Loss of the batch and its gradient."""
    loss, _ = loss_and_metrics(log_probs, torch.zeros_like(log_probs), tokens, algorithm)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient


def clipped_surrogate(ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.15) * advantage)


def exp(logarithm: torch.Tensor) -> torch.Tensor:
    return logarithm.clamp(-20, 20).exp()


def gspo(log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Equation 5 of the paper, of one response."""
    return -clipped_surrogate(exp((log_probs - old).mean()), advantages[0])


def cispo(log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Equation 4 of the paper, of one response and by its length."""
    weights = exp(log_probs - old).clamp(0.9, 1.15).detach()
    return -(weights * advantages * log_probs).mean()


def ppo(log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return -clipped_surrogate(exp(log_probs - old), advantages).mean()


def dppo(apart: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Formula:
    """Equations 9 and 10 of the paper, of one response, the weight bounded as in its section 5.4."""

    def formula(log_probs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        distance = apart(log_probs.detach(), behaviour)
        further = (log_probs.detach() - behaviour) * advantages > 0
        bounds = torch.where(advantages > 0, 0.15, 0.1)
        weights = exp(log_probs - behaviour).detach().clamp(max=20) * ~(further & (distance > bounds))
        return -(weights * advantages * log_probs).mean()

    return formula


def kl_of_two(log_probs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """A probability that is 0 in float64 has a logarithm all the same."""
    policy, before = 1 - log_probs.exp(), 1 - behaviour.exp()
    others = torch.where(before > 0, before * (before / policy).log(), torch.zeros(()))
    return behaviour.exp() * (behaviour - log_probs) + others


PROXIMAL: dict[str, Formula] = {"gspo": gspo, "cispo": cispo, "policy_loss": ppo}
FORMULAS = PROXIMAL | {
    "dppo_tv": dppo(lambda current, behaviour: (current.exp() - behaviour.exp()).abs()),
    "dppo_kl": dppo(kl_of_two),
}


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=40, deadline=None)
@given(samples=responses, draw=st.randoms(use_true_random=False))
def test_it_is_its_formula_over_ragged_masks_empty_responses_and_policies_far_apart(
    name: str, samples: list[Response], draw: random.Random
) -> None:
    """The second log-prob of a token stands for the policy that is trained."""
    algorithm = AlgorithmConfig(loss_type=name, **CLIPS)
    of_samples = [draw.choice([-2.0, -0.5, 0.0, 1.0]) for _ in samples]
    pairs = zip(of_samples, samples, strict=True)
    advantages = [np.full(len(sample), value, np.float32) for value, sample in pairs]
    tokens = tokens_of(dataclasses.replace(batch_of(samples), advantages=advantages), algorithm)
    assert tokens.rollout_log_probs is not None
    assert tokens.old_log_probs is not None
    assert tokens.advantages is not None
    current = tokens.rollout_log_probs.double().requires_grad_()
    rows = [tokens.samples == sample for sample in range(len(samples))]
    losses = [
        FORMULAS[name](current[row], tokens.old_log_probs[row].double(), tokens.advantages[row].double())
        for row in rows
        if row.any()
    ]
    expected = sum(losses, 0 * current.sum()) / len(samples)
    (right,) = torch.autograd.grad(expected, current)
    loss, gradient = of(algorithm, current, dataclasses.replace(tokens, rollout_log_probs=tokens.old_log_probs))
    assert loss == pytest.approx(expected.item(), rel=1e-4, abs=1e-7)
    torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-8)


def test_gspo_follows_tokens_where_their_advantages_differ_and_the_response_where_they_are_equal() -> None:
    """GSPO-token and GSPO, equations 13 and 5."""
    inside, outside = (AlgorithmConfig(loss_type=name, **CLIPS) for name in ("gspo", OUTSIDE))
    assert BATCH.advantages is not None
    uneven = [values + np.linspace(0, 1, len(values), dtype=np.float32) for values in BATCH.advantages]
    for batch, same in ((BATCH, True), (dataclasses.replace(BATCH, advantages=uneven), False)):
        tokens = tokens_of(batch, inside)
        log_probs = near(tokens, spread=0.01)  # none is clipped
        (loss, gradient), (other_loss, other) = (of(algorithm, log_probs, tokens) for algorithm in (inside, outside))
        assert loss == pytest.approx(other_loss, rel=1e-6)
        assert torch.allclose(gradient, other, rtol=1e-5, atol=1e-9) == same
        torch.testing.assert_close(tokens.sums(gradient), tokens.sums(other), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", PROXIMAL)
def test_in_one_optimizer_step_nothing_need_be_scored(name: str) -> None:
    """The ratio is 1 whether old log-probs are those of the policy itself or are left out, in every bit."""
    algorithm = AlgorithmConfig(loss_type=name, **CLIPS)
    tokens = tokens_of(BATCH, algorithm)
    log_probs = near(tokens)
    scored = dataclasses.replace(tokens, old_log_probs=log_probs.detach())
    left_out = dataclasses.replace(tokens, old_log_probs=None)
    (loss, gradient), (other_loss, other) = (of(algorithm, log_probs, either) for either in (scored, left_out))
    assert loss == other_loss
    assert torch.equal(gradient, other)
    assert tokens.advantages is not None
    torch.testing.assert_close(gradient, (-tokens.weights * tokens.advantages).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_and_its_gradient_are_finite_however_far_the_policies_are(name: str) -> None:
    algorithm = AlgorithmConfig(loss_type=name, **CLIPS)
    tokens = tokens_of(BATCH, algorithm)
    for far in (30.0, 89.0, 1e6):
        signs = torch.where(torch.arange(len(tokens.targets)) % 3 == 0, far, -far)
        log_probs = torch.full_like(signs, -1.0).requires_grad_()
        older = log_probs.detach() + signs
        found: Any = of(algorithm, log_probs, dataclasses.replace(tokens, old_log_probs=older, rollout_log_probs=older))
        assert np.isfinite(found[0]), far
        assert found[1].isfinite().all(), far


def test_a_probability_that_is_rounded_to_1_is_no_further_away_than_what_is_rounded_off() -> None:
    """From 0.999 to 1 - 3e-8, which float32 has as 1, it is 0.001 log(0.001 / 3e-8) at most: far below the paper's
    0.05."""
    certain, before = torch.zeros(1), torch.tensor([0.999]).log()
    assert 0 < dppo_kl.binary_kl(certain, before).item() < 0.001 * np.log(0.001 / 3e-8)
