"""AdamW with float32 state, and the schedules of learning rate and weight decay."""

import math
from collections.abc import Iterable

import torch

from cairn.configs.schema.training import TrainingConfig, warmup_steps

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Optimizer state of a parameter: running means of its gradient and of the gradient's square."""


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: TrainingConfig, *, fused: bool = False
) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), its state already created.

    Only matrices decay: vectors are norms and biases. `set_rates` sets both rates.

    Args:
        fused: update each parameter by one kernel, without temporary copies of its size.
    """
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "decays": True},
            {"params": [p for p in parameters if p.dim() < 2], "decays": False},
        ],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=0.0,
        fused=fused,
    )
    for parameter in parameters:
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
        step = torch.tensor(0.0, device=parameter.device if fused else "cpu")
        optimizer.state[parameter] = {"step": step, **moments}
    return optimizer


def set_position(optimizer: torch.optim.AdamW, steps: int) -> None:
    """Set the optimizer's step count, which determines the bias correction of its moments."""
    for state in optimizer.state.values():
        state["step"].fill_(steps)


def set_rates(optimizer: torch.optim.AdamW, lr: float, weight_decay: float) -> None:
    """Set learning rate and weight decay of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def learning_rate(config: TrainingConfig, steps_taken: int, total_steps: int) -> float:
    """Return the learning rate of the optimizer step after `steps_taken` others.

    The schedules are those of Megatron-core's `OptimizerParamScheduler`, except that the warm-up is one step ahead of
    Megatron's. Its first step takes lr_warmup_init + (lr - lr_warmup_init) / w, where Megatron's takes lr_warmup_init,
    mostly 0. Its last step takes lr.

    With n steps taken, w of warm-up and d = lr_decay_iters (`total_steps` by default) in all, done = (n - w) / (d - w):

    | lr_decay_style | |
    |---|---|
    | constant | lr |
    | linear, cosine, WSD | min_lr + (lr - min_lr) · remaining |
    | inverse-square-root | max(min_lr, lr · √w / √n), with at least 1 for w and n, until d; min_lr after |

    remaining is 1 - done (linear) or (1 + cos(π · done)) / 2 (cosine: Loshchilov and Hutter, "SGDR", 2017, equation 5).
    For WSD (Hu et al., "MiniCPM", 2024, section 4.2) remaining is 1 until the last lr_wsd_decay_iters steps. In these,
    of which a part r is done, it is 2 · 0.5^r - 1 (exponential), 1 - r (linear), (1 + cos(π · r)) / 2 (cosine) or
    1 - √r (minus_sqrt).
    """
    warmup = warmup_steps(config, total_steps)
    if steps_taken + 1 <= warmup:
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * (steps_taken + 1) / warmup
    if steps_taken < warmup:  # the rest of a step
        return config.lr
    if config.lr_decay_style == "constant":
        return config.lr
    last = config.lr_decay_iters or total_steps
    if config.lr_decay_style == "inverse-square-root":
        falling = config.lr * max(warmup, 1) ** 0.5 / max(steps_taken, 1) ** 0.5
        return config.min_lr if steps_taken > last else max(config.min_lr, falling)
    done = min(1.0, (steps_taken - warmup) / (last - warmup)) if last > warmup else 1.0
    return config.min_lr + (config.lr - config.min_lr) * _remaining(config, done, steps_taken, last)


def weight_decay(config: TrainingConfig, steps_taken: int, total_steps: int) -> float:
    """Return the weight decay of the optimizer step after `steps_taken` others.

    As in Megatron-core's `OptimizerParamScheduler`, this is weight_decay, or goes from start_weight_decay to
    end_weight_decay over `total_steps`, along a line or half a cosine.
    """
    style, start, end = config.weight_decay_incr_style, config.start_weight_decay, config.end_weight_decay
    if style == "constant" or start is None or end is None:
        return config.weight_decay
    done = min(1.0, steps_taken / total_steps)
    return start + (end - start) * (done if style == "linear" else (1 + math.cos(math.pi * (1 - done))) / 2)


def _remaining(config: TrainingConfig, done: float, steps_taken: int, last: int) -> float:
    """Return the remaining part of the way from `lr` down to `min_lr`."""
    style: str = config.lr_decay_style
    if style == "WSD":
        fall = config.lr_wsd_decay_iters
        assert fall is not None
        done = min(1.0, max(0.0, (steps_taken - (last - fall)) / fall))
        style = config.lr_wsd_decay_style or "exponential"
    if style == "exponential":
        return 2 * 0.5**done - 1
    if style == "minus_sqrt":
        return 1 - math.sqrt(done)
    return 1 - done if style == "linear" else (1 + math.cos(math.pi * done)) / 2
