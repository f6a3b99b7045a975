"""AdamW with float32 state, and its learning-rate schedules."""

import math
from collections.abc import Iterable

import torch

from cairn.configs.schema.training import TrainingConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The state of a parameter: running means of its gradient and of the gradient's square."""


def build_optimizer(parameters: Iterable[torch.nn.Parameter], config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019) whose state exists from the start.

    Only matrices decay: vectors are norms and biases.
    """
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
    )
    for parameter in parameters:
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return optimizer


def set_position(optimizer: torch.optim.AdamW, steps: int) -> None:
    """Tell the optimizer how many steps it has taken, from which it corrects the bias of its moments."""
    for state in optimizer.state.values():
        state["step"].fill_(steps)


def set_learning_rate(optimizer: torch.optim.AdamW, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def learning_rate(config: TrainingConfig, steps_taken: int, total_steps: int) -> float:
    """Learning rate of the optimizer step after `steps_taken` others.

    Warm-up is linear: its first step takes lr / lr_warmup_iters, its last one lr. Then it stays constant or falls to
    min_lr, linearly or along half a cosine (Loshchilov and Hutter, "SGDR", 2017, equation 5), which it reaches when
    lr_decay_iters steps (`total_steps` by default), warm-up included, have been taken.
    """
    if steps_taken < config.lr_warmup_iters:
        return config.lr * (steps_taken + 1) / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return config.lr
    decay_steps = (config.lr_decay_iters or total_steps) - config.lr_warmup_iters
    done = min(1.0, (steps_taken - config.lr_warmup_iters) / decay_steps) if decay_steps > 0 else 1.0
    remaining = 1 - done if config.lr_decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * remaining
