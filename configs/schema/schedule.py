"""Learning rate and weight decay over a run, by Megatron's names: which there are, and which go together."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cairn.configs.schema.training import TrainingConfig

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WSDStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
IncreaseStyle = Literal["constant", "linear", "cosine"]


def warmup_steps(config: "TrainingConfig", total_steps: int) -> float:
    """Optimizer steps of the warm-up; with `lr_warmup_fraction` they need not be whole."""
    if config.lr_warmup_fraction is not None:
        return config.lr_warmup_fraction * (config.lr_decay_iters or total_steps)
    return config.lr_warmup_iters


def schedule_problem(config: "TrainingConfig") -> str | None:
    """A sentence on options of the schedules that contradict each other or have no effect; None where there are
    none."""
    if config.lr_warmup_fraction is not None and config.lr_warmup_iters:
        return (
            f"lr_warmup_fraction ({config.lr_warmup_fraction}) and lr_warmup_iters ({config.lr_warmup_iters}) exclude "
            "each other: both say how long the warm-up is; leave one of them out"
        )
    if config.lr_warmup_init and not config.lr_warmup_iters and not config.lr_warmup_fraction:
        return (
            f"lr_warmup_init ({config.lr_warmup_init}) has no effect without a warm-up; set lr_warmup_iters, or leave "
            "it out"
        )
    if config.lr_warmup_init > config.lr:
        return f"lr_warmup_init ({config.lr_warmup_init}) is above lr ({config.lr}), which the warm-up ends at"
    return _decay_problem(config) or _weight_decay_problem(config)


def _decay_problem(config: "TrainingConfig") -> str | None:
    style, last = config.lr_decay_style, config.lr_wsd_decay_iters
    if style != "WSD":
        for name in ("lr_wsd_decay_iters", "lr_wsd_decay_style"):
            value = getattr(config, name)
            if value is not None:
                return (
                    f"{name} ({value}) has no effect while lr_decay_style is {style}; set lr_decay_style=WSD, or leave "
                    "it out"
                )
        return None
    if last is None:
        return "lr_decay_style is WSD, which needs lr_wsd_decay_iters: the optimizer steps of the decay at the end"
    if config.lr_decay_iters is not None and last > config.lr_decay_iters - warmup_steps(config, 0):
        return (
            f"lr_wsd_decay_iters ({last}) leaves of lr_decay_iters ({config.lr_decay_iters}) less than the warm-up "
            "takes: lower it"
        )
    return None


def _weight_decay_problem(config: "TrainingConfig") -> str | None:
    style, start, end = config.weight_decay_incr_style, config.start_weight_decay, config.end_weight_decay
    if style == "constant":
        for name, value in (("start_weight_decay", start), ("end_weight_decay", end)):
            if value is not None:
                return (
                    f"{name} ({value}) has no effect while weight_decay_incr_style is constant; set it to linear or "
                    "cosine, or leave the other out"
                )
        return None
    if start is None or end is None:
        return f"weight_decay_incr_style is {style}, which needs start_weight_decay and end_weight_decay: set both"
    if end < start:
        return f"end_weight_decay ({end}) is below start_weight_decay ({start}): weight decay only rises"
    if config.weight_decay:
        return (
            f"weight_decay ({config.weight_decay}) has no effect while weight_decay_incr_style is {style}, which goes "
            "from start_weight_decay to end_weight_decay; leave it out"
        )
    return None
