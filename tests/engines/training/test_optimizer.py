import math

import pytest
import torch

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.optimizer import build_optimizer, learning_rate


def rates(config: TrainingConfig, steps: range, total_steps: int = 10) -> list[float]:
    return [learning_rate(config, step, total_steps) for step in steps]


def test_warm_up_is_linear_and_reaches_the_rate_at_its_last_step() -> None:
    config = TrainingConfig(lr=1.0, lr_warmup_iters=4)
    assert rates(config, range(6)) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_ends_at_the_least_rate_and_stays_there() -> None:
    config = TrainingConfig(lr=1.0, min_lr=0.2, lr_decay_style="linear", lr_decay_iters=4)
    assert rates(config, range(6)) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_decay_starts_after_the_warm_up_and_is_half_way_in_the_middle() -> None:
    config = TrainingConfig(lr=1.0, lr_warmup_iters=2, lr_decay_style="cosine")
    assert learning_rate(config, 2, 10) == 1.0
    assert learning_rate(config, 6, 10) == pytest.approx(0.5)
    assert learning_rate(config, 4, 10) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert learning_rate(config, 10, 10) == pytest.approx(0.0, abs=1e-12)


def test_a_run_no_longer_than_its_warm_up_never_decays_below_the_least_rate() -> None:
    config = TrainingConfig(lr=1.0, min_lr=0.1, lr_warmup_iters=10, lr_decay_style="linear")
    assert rates(config, range(9, 12)) == [1.0, 0.1, 0.1]


def test_weight_decay_touches_matrices_alone() -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([matrix, vector], TrainingConfig(lr=0.1, weight_decay=0.5))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(vector, torch.ones(2))
