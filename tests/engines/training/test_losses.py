"""What recorded values of other implementations (`tests/parity`) do not say of losses: how much is clipped, defaults,
expectations, and numbers that are far apart."""

import math
from itertools import product
from typing import Any

import pytest
import torch

from cairn.configs.schema.algorithm import AlgorithmConfig, KLType
from cairn.engines.training.aggregations import sequence_weights, token_weights
from cairn.engines.training.collate import Tokens
from cairn.engines.training.corrections.tis import importance_weights
from cairn.engines.training.losses.kl import kl_divergence
from cairn.engines.training.losses.objective import loss_and_metrics
from cairn.engines.training.losses.policy_loss import policy_loss
from cairn.engines.training.losses.value import value_loss
from tests.tables import cases


def log_ratio(*ratios: float) -> torch.Tensor:
    return -torch.tensor(ratios).log()


def test_the_ratio_is_clipped_on_the_side_where_the_advantage_would_push_it_further() -> None:
    loss, clipped = policy_loss(
        log_ratio(1.5, 1.5, 0.5, 0.5, 1.25),
        torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0]),
        eps_clip=0.2,
        eps_clip_high=0.28,
    )
    assert loss.tolist() == pytest.approx([-2.56, 3.0, -1.0, 1.6, -2.5])
    assert clipped.tolist() == [1, 0, 0, 1, 0]


def test_the_upper_clip_range_is_the_lower_one_unless_given() -> None:
    loss, _ = policy_loss(log_ratio(1.5), torch.tensor([1.0]), eps_clip=0.2)
    assert loss.item() == pytest.approx(-1.2)


@cases("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_expected_gradient_of_an_estimator_as_a_loss_is_that_of_the_divergence_it_stands_for(kind: KLType) -> None:
    """Exact over a vocabulary of six: Σ π(a) ∇ estimate(a), which is what on-policy samples give on average."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=draw, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, generator=draw, dtype=torch.float64).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    sampled = (log_probs.detach().exp() * kl_divergence(log_probs, reference, kind)).sum()
    reverse = (log_probs.exp() * (log_probs - reference)).sum()
    forward = (reference.exp() * (reference - log_probs)).sum()
    meant = {"k1": 0 * reverse, "k2": reverse, "k3": forward, "low_var_kl": forward}[kind]
    (found,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(meant, logits)
    assert torch.allclose(found, expected, atol=1e-14)


@cases("kind", ["k1", "k3", "low_var_kl"])
def test_with_the_ratio_value_and_gradient_are_the_divergences_own_however_far_the_policy_has_moved(
    kind: KLType,
) -> None:
    """Exact over a vocabulary of six: Σ π_old(a) π(a)/π_old(a) estimate(a)."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=draw, dtype=torch.float64, requires_grad=True)
    reference, old = torch.randn(2, 6, generator=draw, dtype=torch.float64).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    sampled = (old.exp() * kl_divergence(log_probs, reference, kind, old)).sum()
    divergence = (log_probs.exp() * (log_probs - reference)).sum()
    assert sampled.item() == pytest.approx(divergence.item(), rel=1e-12)
    (found,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(divergence, logits)
    assert torch.allclose(found, expected, atol=1e-14)
    without = (old.exp() * kl_divergence(log_probs, reference, kind)).sum()
    assert abs(without.item() - divergence.item()) > 0.05


def test_the_default_of_the_kl_loss_has_the_gradient_of_the_divergence() -> None:
    assert AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1).kl_estimator == "k2"
    assert AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, use_unbiased_kl=True).kl_estimator == "k3"
    assert AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, use_unbiased_kl=True, kl_loss_type="k1")


@cases("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_gradients_of_the_estimators_are_those_of_finite_differences(kind: KLType) -> None:
    """What an expectation does not tell: a term of the estimate without its gradient, which is 0 on average."""
    reference = torch.tensor([-2.0, -1.0, -0.5, -3.0], dtype=torch.float64)
    log_probs = torch.tensor([-0.1, -1.5, -2.5, -3.1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda current: kl_divergence(current, reference, kind), log_probs)
    old = torch.tensor([-0.5, -1.0, -2.0, -3.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda current: kl_divergence(current, reference, kind, old), log_probs)


@cases("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_kl_loss_and_its_gradient_are_finite_however_far_the_policy_is_from_the_reference(kind: KLType) -> None:
    for far in (89.0, 200.0, 1e6):
        log_probs = torch.tensor([-far, -far, 0.0], requires_grad=True)
        loss = kl_divergence(log_probs, torch.tensor([0.0, -2 * far, -far]), kind)
        loss.sum().backward()
        assert loss.isfinite().all(), far
        assert log_probs.grad is not None
        assert log_probs.grad.isfinite().all(), far
        if kind != "k1":  # whose gradient is 1 everywhere; that of the others never leads further away
            assert (log_probs.grad * (log_probs - torch.tensor([0.0, -2 * far, -far])) >= 0).all(), far


def test_the_policy_loss_its_gradient_and_importance_weights_are_finite_however_far_the_policies_are() -> None:
    for far in (89.0, 200.0, 1e6):
        ppo_kl = torch.tensor([-far, -far, -far, far, far], requires_grad=True)
        loss, _ = policy_loss(ppo_kl, torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0]), eps_clip=0.2)
        loss.sum().backward()
        assert loss.isfinite().all(), far
        assert loss[0].item() == pytest.approx(-1.2)
        assert ppo_kl.grad is not None
        assert ppo_kl.grad.isfinite().all(), far
        weights, ratio = importance_weights(torch.tensor([0.0, -far]), torch.tensor([-far, 0.0]), low=0.5, high=2.0)
        assert weights.tolist() == [2.0, 0.5]
        assert ratio.isfinite().all(), far


def test_low_var_kl_is_limited_and_k3_is_not() -> None:
    far = torch.tensor([-5.0]), torch.tensor([0.0])
    assert kl_divergence(*far, "low_var_kl").item() == 10
    assert kl_divergence(*far, "k3").item() == pytest.approx(math.exp(5) - 6, rel=1e-6)


def test_the_sample_mean_weighs_samples_alike_and_counts_those_without_trained_tokens() -> None:
    weights = token_weights([4, 0, 1, 2], AlgorithmConfig())
    assert [weight.loss for weight in weights] == [1 / 16, 1 / 4, 1 / 4, 1 / 8]
    assert [weight.share for weight in weights] == [weight.loss for weight in weights]


def test_the_token_mean_weighs_tokens_alike() -> None:
    assert token_weights([4, 0, 1, 5], AlgorithmConfig(calculate_per_token_loss=True)) == [(0.1, 0.1, 0.1)] * 4


def test_a_constant_divisor_weighs_tokens_alike_whatever_the_lengths_are_and_leaves_means_means() -> None:
    """Dr. GRPO: the second batch has one more token in a sample, and no other token's weight changes."""
    algorithm = AlgorithmConfig(loss_scale_factor=8)
    for counts in ([4, 0, 1, 5], [4, 0, 2, 5]):
        weights = token_weights(counts, algorithm)
        assert [weight.loss for weight in weights] == [1 / 32] * 4
        assert [weight.share for weight in weights] == [
            weight.share for weight in token_weights(counts, AlgorithmConfig())
        ]


def test_a_constant_divisor_and_the_token_mean_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"loss_scale_factor \(8\) and calculate_per_token_loss \(true\) exclude each"):
        AlgorithmConfig(loss_scale_factor=8, calculate_per_token_loss=True)


def test_a_value_that_moved_beyond_the_clip_towards_its_return_has_no_gradient() -> None:
    old, returns = torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0])
    values = torch.tensor([0.1, 0.5, 0.5, -0.5], requires_grad=True)
    loss, clipped = value_loss(values, old, returns, 0.2)
    # Within the range; beyond it towards the return; beyond it away; beyond it towards.
    assert loss.tolist() == pytest.approx([0.81, 0.64, 2.25, 0.64])
    assert clipped.tolist() == [0, 1, 0, 1]
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-1.8, 0, 3.0, 0])


def test_what_is_masked_leaves_the_others_their_weight() -> None:
    """The first sample keeps 2 of 4 tokens, the second none: tokens that stay weigh what they did, metrics are means
    over these."""
    for options in ({}, {"calculate_per_token_loss": True}, {"loss_scale_factor": 8}):
        algorithm = AlgorithmConfig(**options)
        whole = token_weights([4, 3, 5], algorithm)
        masked = token_weights([2, 0, 5], algorithm, [4, 3, 5])
        assert [weight.loss for weight in masked] == [weight.loss for weight in whole]
        assert [weight.value for weight in masked] == [weight.value for weight in whole]
        assert [weight.share for weight in masked] == [weight.share for weight in token_weights([2, 0, 5], algorithm)]
    assert sequence_weights([2, 0, 5], [0, 0, 1], AlgorithmConfig(), [4, 3, 5])[0].loss == 1 / 14


WEIGHTED: list[dict[str, Any]] = [
    {"use_tis": True, "use_unbiased_kl": True},
    {"use_tis": True},
    {"use_tis": True, "use_unbiased_kl": True, "kl_loss_type": "k1"},
    {"use_rollout_logprobs": True, "use_unbiased_kl": True},
]


@cases(("options", "moved"), product(WEIGHTED, (False, True)))
def test_the_kl_loss_has_the_divergence_s_gradient_whatever_weights_sampled(options: dict, moved: bool) -> None:
    """A bandit of 4 arms that the behaviour policy sampled; the proximal policy is the trained one, or has moved."""
    behaviour, reference = torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), torch.full((4,), 0.25).log()
    theta = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().requires_grad_()
    divergence = (theta.softmax(0) * (theta.log_softmax(0) - reference)).sum()
    (exact,) = torch.autograd.grad(divergence, theta)
    arms = torch.arange(4).repeat_interleave(torch.tensor([400, 300, 200, 100]))
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=1.0, **options)
    log_probs = theta.log_softmax(0)[arms]
    proximal = torch.tensor([0.3, 0.3, 0.2, 0.2]).log()[arms] if moved else log_probs.detach()
    count = len(arms)
    tokens = Tokens(
        torch.zeros(1, 2, dtype=torch.int64),
        torch.arange(count),
        torch.zeros(count, dtype=torch.int64),
        weights=torch.full((count,), 1 / count),
        shares=torch.full((count,), 1 / count),
        samples=torch.arange(count),
        groups=torch.arange(count),
        counts=torch.ones(count),
        advantages=torch.zeros(count),
        old_log_probs=behaviour[arms] if algorithm.use_rollout_logprobs else proximal,
        rollout_log_probs=behaviour[arms],
        ref_log_probs=reference[arms],
    )
    loss, metrics = loss_and_metrics(log_probs, torch.zeros(count), tokens, algorithm)
    torch.testing.assert_close(torch.autograd.grad(loss, theta)[0], exact, atol=1e-5, rtol=1e-4)
    if algorithm.use_unbiased_kl:
        assert float(metrics["kl_loss"]) == pytest.approx(float(divergence.detach()), rel=1e-4)
