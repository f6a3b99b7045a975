"""Options that would make a run faster, given its measured balance: those that affect its bottleneck."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cairn.configs.errors import ConfigError
from cairn.configs.loader import inherit
from cairn.configs.schema.run import RunConfig
from cairn.flows.plan.remedies import Change, more_ranks
from cairn.flows.reading.balance import Balance, Bottleneck
from cairn.storage.ledger.commits import Step

NOTABLE = 0.1
"""Share of the time below which a wait does not justify a change."""
_NAMES = {
    Bottleneck.ROLLOUT: "rollout is",
    Bottleneck.TRAINER: "training is",
    Bottleneck.GRADERS: "the graders are",
    Bottleneck.DRIVER: "what the driver does between their steps is",
}


def takes_turns(config: RunConfig) -> bool:
    """Whether each side waits while the other works, by design: without a lag."""
    return not config.rollout.weights_lag


def shares_gpus(config: RunConfig) -> bool:
    """Whether both sides use the memory of the same GPUs, so that they cannot work concurrently."""
    return config.fleet.colocate or config.fleet.offloads_train or config.fleet.offloads_rollout


def is_balanced(balance: Balance) -> bool:
    """Whether neither side waits for a notable share of the time."""
    return max(balance.rollout_wait, balance.trainer_wait) < NOTABLE


def advice(balance: Balance, recorded: Mapping[str, Any], config: RunConfig) -> tuple[Change, ...]:
    """Return changes that would help, each on its own; changes that need no more machines come first. Only changes that
    a fork of the run accepts: `recorded` is the manifest's configuration."""
    if is_balanced(balance):
        return ()
    return tuple(change for change in _changes(balance, config) if _is_sound(recorded, change))


def spelled(balance: Balance, changes: Sequence[Change], config: RunConfig) -> str:
    """Return `the trainer waits 41 % of the time, the rollout engines 3 %: rollout is the bottleneck; …`."""
    said = f"the trainer waits {_percent(balance.trainer_wait)} of the time, the rollout engines "
    said += _percent(balance.rollout_wait)
    if is_balanced(balance):
        return f"{said}: balanced"
    said += f": {_NAMES[balance.bottleneck]} the bottleneck"
    if balance.bottleneck is Bottleneck.DRIVER:
        said += f", neither side works {_percent(balance.neither)} of the time"
    if shares_gpus(config):
        said += "; sides that share GPUs (fleet.colocate, fleet.offload_train, fleet.offload_rollout) take turns"
    elif takes_turns(config):
        said += "; with rollout.pipeline sync each waits while the other works, lagged overlaps them: iterations "
        said += f"{balance.overlap:.2f} times as fast at best"
    options = [" with ".join(f"{option}={_value(value)}" for option, value in change.items()) for change in changes]
    return said + (f"; try {', or '.join(options)}" if options else "")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _is_sound(recorded: Mapping[str, Any], change: Change) -> bool:
    try:
        inherit(recorded, [f"{option}={json.dumps(value)}" for option, value in change.items()])
    except ConfigError:
        return False
    return True


def _changes(balance: Balance, config: RunConfig) -> Iterator[Change]:
    if takes_turns(config) and not shares_gpus(config) and balance.overlap > 1 + NOTABLE:
        corrects = config.algorithm.corrects_for_lag
        yield {"rollout.pipeline": "lagged", **({} if corrects else {"algorithm.use_tis": True})}
    match balance.bottleneck:
        case Bottleneck.ROLLOUT:
            yield from _for_rollout(balance, config)
        case Bottleneck.TRAINER:
            yield from _for_training(balance, config)
        case Bottleneck.GRADERS:
            yield {"reward.num_workers": 2 * config.reward.num_workers}
    lag = config.rollout.weights_lag
    both_wait = min(balance.rollout_wait, balance.trainer_wait) >= NOTABLE
    if lag and both_wait and balance.bottleneck in (Bottleneck.ROLLOUT, Bottleneck.TRAINER):
        # Their times vary between iterations; a longer queue evens them out.
        yield {"rollout.max_age" if config.rollout.pipeline == "streaming" else "rollout.lag": lag + 1}


def _for_rollout(balance: Balance, config: RunConfig) -> Iterator[Change]:
    rollout = config.rollout
    drawn = rollout.over_sampling_batch_size or rollout.rollout_batch_size
    if balance.rounds >= 1 + NOTABLE and balance.groups > drawn:
        yield {"rollout.over_sampling_batch_size": math.ceil(balance.groups)}  # in one round in place of several
    if balance.queued:
        yield {"rollout.max_running_requests": 2 * rollout.max_running_requests}
    if balance.engines_apart >= NOTABLE and not rollout.partial_rollout:
        lag = rollout.weights_lag
        yield (
            {"rollout.partial_rollout": True}
            | ({"rollout.max_age": lag + 1} if rollout.oldest_trained <= lag else {})
            | ({} if config.algorithm.corrects_for_lag else {"algorithm.use_tis": True})
        )
    engines = min(2 * rollout.num_engines, drawn)  # one without a group has nothing to do
    if engines > rollout.num_engines:
        yield more_ranks(config, 2) if config.fleet.colocate else {"rollout.num_engines": engines}


def _for_training(balance: Balance, config: RunConfig) -> Iterator[Change]:
    training, save_interval = config.training, config.checkpoint.save_interval
    if training.max_tokens_per_gpu is not None:
        yield {"training.max_tokens_per_gpu": 2 * training.max_tokens_per_gpu}
    if training.micro_batch_size is not None:
        yield {"training.micro_batch_size": 2 * training.micro_batch_size}
    if training.gradient_checkpointing:
        yield {"training.gradient_checkpointing": False}
    if save_interval is not None and balance.steps.get(Step.CHECKPOINT, 0.0) >= NOTABLE:
        yield {"checkpoint.save_interval": 2 * save_interval}
    yield more_ranks(config, 2)
