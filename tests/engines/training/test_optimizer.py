import math
import re
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.megatron.backend import backend_for
from cairn.engines.training.optimizer import build_optimizer, learning_rate, set_rates, weight_decay
from tests.mistakes import mistakes


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
    optimizer = build_optimizer([matrix, vector], TrainingConfig())
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    set_rates(optimizer, 0.1, 0.5)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(vector, torch.ones(2))


SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {"lr_decay_style": "linear"},
    "cosine": {"lr_decay_style": "cosine", "lr_decay_iters": 20},
    "inverse square root": {"lr_decay_style": "inverse-square-root", "lr_decay_iters": 25},
    **{
        f"WSD, {style}": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 8, "lr_wsd_decay_style": style}
        for style in ("exponential", "linear", "cosine", "minus_sqrt")
    },
}
TOTAL = 30


WARM_UPS: dict[str, dict[str, Any]] = {
    "no warm-up": {},
    "warm-up of 5 steps": {"lr_warmup_iters": 5, "lr_warmup_init": 1e-4},
    "warm-up of a fraction": {"lr_warmup_fraction": 0.13},
}
WEIGHT_DECAYS: dict[str, dict[str, Any]] = {
    "constant weight decay": {"weight_decay": 0.05},
    **{
        f"{style} weight decay": {
            "weight_decay_incr_style": style,
            "start_weight_decay": 0.01,
            "end_weight_decay": 0.1,
        }
        for style in ("linear", "cosine")
    },
}


@pytest.mark.proof
def test_rates_are_those_of_megatrons_own_scheduler() -> None:
    differing = {}
    for schedule, warm_up, decay in product(SCHEDULES, WARM_UPS, WEIGHT_DECAYS):
        options = SCHEDULES[schedule] | WARM_UPS[warm_up] | WEIGHT_DECAYS[decay]
        config = TrainingConfig(lr=1e-2, min_lr=1e-3, **options)
        own = [(learning_rate(config, taken, TOTAL), weight_decay(config, taken, TOTAL)) for taken in range(TOTAL + 4)]
        megatron = rates_of_megatron(config)
        steps = [step for step, pair in enumerate(zip(own, megatron, strict=True)) if pair[0] != approx(pair[1])]
        if steps:
            differing[schedule, warm_up, decay] = steps
    assert differing == {}


def approx(rates: tuple[float, float]) -> Any:
    return pytest.approx(rates, rel=1e-14)


def rates_of_megatron(config: TrainingConfig) -> list[tuple[float, float]]:
    """Learning rate and weight decay at the same count of steps; in the warm-up the learning rate is that of one step
    more, so that the first step is not taken at a rate of 0."""
    backend_for(torch.device("cpu"))
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    last = config.lr_decay_iters or TOTAL
    rising = config.lr_warmup_iters or (config.lr_warmup_fraction or 0) * last
    group = {"lr": 0.0, "weight_decay": 0.0}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=rising,
        lr_decay_steps=last,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay if config.start_weight_decay is None else config.start_weight_decay,
        end_wd=config.weight_decay if config.end_weight_decay is None else config.end_weight_decay,
        wd_incr_steps=TOTAL,
        wd_incr_style=config.weight_decay_incr_style,
        wsd_decay_steps=config.lr_wsd_decay_iters,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )
    expected = []
    for _ in range(TOTAL + 5):
        expected.append(dict(group))
        scheduler.step(1)
    rates = []
    for taken in range(TOTAL + 4):
        ahead = taken + (taken + 1 <= rising)
        ends_within_the_step = ahead < rising and ahead == taken  # what is left of a warm-up
        rate = config.lr if ends_within_the_step else expected[ahead]["lr"]
        rates.append((rate, expected[taken]["weight_decay"]))
    return rates


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 2}, r"lr_warmup_fraction \(0.1\) and lr_warmup_iters \(2\)"),
    ({"lr_warmup_init": 1e-7}, r"lr_warmup_init \(1e-07\) has no effect while there is no warm-up"),
    ({"lr_warmup_init": 1.0, "lr_warmup_iters": 2}, "is above lr"),
    ({"lr_wsd_decay_iters": 2}, "no effect while training.lr_decay_style is constant"),
    ({"lr_decay_style": "WSD"}, "needs lr_wsd_decay_iters"),
    ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9, "lr_decay_iters": 10, "lr_warmup_iters": 2}, "lower it"),
    ({"end_weight_decay": 0.1}, "no effect while training.weight_decay_incr_style is constant"),
    ({"weight_decay_incr_style": "linear"}, "needs start_weight_decay and end_weight_decay"),
    (
        {"weight_decay_incr_style": "linear", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
        "weight decay only rises",
    ),
    (
        {"critic": {"lr_decay_style": "WSD"}},
        "for the critic, with the options of training.critic: lr_decay_style is WSD",
    ),
    ({"critic": {"min_lr": 1.0}}, r"critic\.min_lr \(1\.0\) is above lr"),
    (
        {"critic_lr_warmup_iters": 5, "critic": {"lr_decay_iters": 2}},
        r"critic_lr_warmup_iters \(5\) must be below critic\.lr_decay_iters \(2\)",
    ),
    ({"critic": {"lr_warmup_init": 1e-7}}, "there is no warm-up; set training.critic_lr_warmup_iters"),
    ({"micro_batch_size": 2, "max_tokens_per_gpu": 64}, r"micro_batch_size \(2\) and max_tokens_per_gpu \(64\)"),
]
"""Options that contradict each other or have no effect, and what is said of them."""


def test_options_that_contradict_each_other_or_have_no_effect_are_said() -> None:
    unsaid = {}
    for options, sentence in REFUSED:
        critic = {"advantage_estimator": "ppo"} if "critic" in options or "critic_lr_warmup_iters" in options else {}
        found = mistakes(training=options, algorithm=critic)
        if not re.search(sentence, found):
            unsaid[sentence] = found
    assert unsaid == {}


def test_a_critic_may_leave_out_what_the_schedules_of_the_actor_need() -> None:
    falling = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 5, "lr": 1e-3, "min_lr": 1e-4, "critic_lr": 1e-5}
    rising = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 1.0}
    steady = {"lr_decay_style": "constant", "min_lr": 0.0, "weight_decay_incr_style": "constant", "weight_decay": 0.1}
    critic = TrainingConfig(**falling, **rising, critic=steady).of_critic  # type: ignore[arg-type]
    assert [learning_rate(critic, taken, 10) for taken in (0, 9)] == [1e-5, 1e-5]
    assert [weight_decay(critic, taken, 10) for taken in (0, 9)] == [0.1, 0.1]
