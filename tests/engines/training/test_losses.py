import math

import pytest
import torch

from engines.training.losses.aggregate import token_weights
from engines.training.losses.kl import kl_divergence
from engines.training.losses.policy import policy_loss
from engines.training.losses.tis import importance_weights
from engines.training.losses.value import value_loss


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


def test_the_dual_clip_bounds_the_loss_of_negative_advantages_alone() -> None:
    loss, _ = policy_loss(log_ratio(10.0, 10.0, 2.0), torch.tensor([-1.0, 1.0, -1.0]), eps_clip=0.2, eps_clip_c=3.0)
    assert loss.tolist() == pytest.approx([3.0, -1.2, 2.0])


def test_a_clipped_token_has_no_gradient_and_another_one_that_of_the_ratio() -> None:
    ppo_kl = log_ratio(1.5, 1.1).requires_grad_()
    policy_loss(ppo_kl, torch.tensor([1.0, 1.0]), eps_clip=0.2)[0].sum().backward()
    assert ppo_kl.grad is not None
    assert ppo_kl.grad.tolist() == pytest.approx([0.0, 1.1])


def test_kl_estimators_have_their_closed_forms() -> None:
    current, reference = torch.tensor([math.log(0.5), math.log(0.2)]), torch.tensor([math.log(0.25), math.log(0.4)])
    ln2 = math.log(2)
    assert kl_divergence(current, reference, "k1").tolist() == pytest.approx([ln2, -ln2])
    assert kl_divergence(current, reference, "k2").tolist() == pytest.approx([ln2**2 / 2] * 2)
    for kind in ("k3", "low_var_kl"):
        assert kl_divergence(current, reference, kind).tolist() == pytest.approx([0.5 - 1 + ln2, 2 - 1 - ln2])


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: str) -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    divergence = (p * (p / q).log()).sum()
    estimate = (p * kl_divergence(p.log(), q.log(), kind)).sum()  # type: ignore[arg-type]
    assert estimate.item() == pytest.approx(divergence.item(), rel=1e-12)


def test_low_var_kl_is_limited_and_k3_is_not() -> None:
    far = torch.tensor([-5.0]), torch.tensor([0.0])
    assert kl_divergence(*far, "low_var_kl").item() == 10
    assert kl_divergence(*far, "k3").item() == pytest.approx(math.exp(5) - 6, rel=1e-6)


def test_importance_weights_are_the_ratio_of_trainer_to_rollout_within_bounds() -> None:
    weights, ratio = importance_weights(-log_ratio(0.1, 1.5, 3.0), torch.zeros(3), low=0.5, high=2.0)
    assert ratio.tolist() == pytest.approx([0.1, 1.5, 3.0])
    assert weights.tolist() == pytest.approx([0.5, 1.5, 2.0])


def test_the_sample_mean_weighs_samples_alike_and_counts_those_without_trained_tokens() -> None:
    assert token_weights([4, 0, 1, 2], per_token=False) == [1 / 16, 1 / 4, 1 / 4, 1 / 8]


def test_the_token_mean_weighs_tokens_alike() -> None:
    assert token_weights([4, 0, 1, 5], per_token=True) == [0.1] * 4


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
