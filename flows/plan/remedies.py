"""Options that would let a recipe fit, found by planning it with them."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

from cairn.configs.errors import ConfigError
from cairn.configs.loader import parse
from cairn.configs.schema.run import RunConfig
from cairn.engines.rollout.plan import kind_of
from cairn.flows.plan.subject import Plan, Remedy

MOST = 4
"""Number of remedies that are reported at most."""
_DEPTH = 4
"""Number of options that are changed together at most, where no single one is enough."""

Change = dict[str, Any]
"""Options with their new values."""


def remedies(config: RunConfig, plan: Plan, planned: Callable[[RunConfig], Plan]) -> tuple[Remedy, ...]:
    """Return changes after which a recipe fits; those that leave most room come first.

    Each changes one option, with its consequences. Where none is enough: the shortest sequence of changes, each of
    which removes most of the excess. More GPUs are only suggested where nothing else helps.
    """
    if plan.fits:
        return ()
    full = {memory.of.partition(",")[0] for memory in plan.memory if not memory.fits}
    fitting: dict[frozenset[str], Remedy] = {}
    changes: Change = {}
    current, before = config, plan
    for _ in range(_DEPTH):
        tried = [(change, new, planned(new)) for change, new in _valid_changes(current)]
        better = [(change, new, after) for change, new, after in tried if _excess(after) < _excess(before)]
        for change, _, after in better:
            if after.fits:  # the first fitting value of an option changes least
                fitting.setdefault(frozenset(change), _remedy({**changes, **change}, after, full))
        if fitting or not better:
            break
        change, current, before = min(better, key=lambda one: _excess(one[2]))
        changes |= change
    cheap = [remedy for remedy in fitting.values() if "training.world_size" not in remedy.options]
    return tuple(sorted(cheap or fitting.values(), key=lambda remedy: remedy.highest / remedy.capacity)[:MOST])


def _valid_changes(config: RunConfig) -> Iterator[tuple[Change, RunConfig]]:
    """Yield changes that produce a valid configuration."""
    values = config.model_dump(mode="json", exclude_unset=True)
    for change in _changes(config):
        changed = _with(values, change)
        try:
            yield change, parse(changed)
        except ConfigError:
            continue


def _changes(config: RunConfig) -> Iterator[Change]:
    training, rollout = config.training, config.rollout
    machine = rollout.num_gpus_per_node if training.num_gpus_per_rank else training.world_size
    if not training.gradient_checkpointing:
        yield {"training.gradient_checkpointing": True}
    if (limit := training.max_tokens_per_gpu) is not None:
        yield from ({"training.max_tokens_per_gpu": limit // part} for part in (2, 4, 8) if limit // part >= 512)
    if (size := training.micro_batch_size) is not None and size > 1:
        yield {"training.micro_batch_size": 1}
    if training.max_tokens_per_gpu is None and training.micro_batch_size is None:
        yield {"training.micro_batch_size": 1}
    if training.engine == "megatron":
        yield from _megatron_changes(config, machine)
    elif not config.data.has_images:
        size = training.context_parallel_size * 2
        while size <= min(machine, training.world_size):
            yield {"training.context_parallel_size": size}
            size *= 2
    for times in (2, 4, 8, 16):
        yield more_ranks(config, times)
    gpus = int(rollout.num_gpus_per_engine)
    if kind_of(rollout.engine).spans_gpus and gpus and not rollout.server_groups:
        for size in (gpus * 2, gpus * 4, gpus * 8):
            yield {
                "rollout.num_gpus_per_engine": size,
                "rollout.num_engines": max(1, rollout.num_engines * gpus // size),
                **({"rollout.sglang.tp_size": size} if "tp_size" in rollout.sglang else {}),
            }
        for percent in (70, 80, 88):
            if percent / 100 > float(rollout.sglang.get("mem_fraction_static") or 1):
                yield {"rollout.sglang.mem_fraction_static": percent / 100}


def _megatron_changes(config: RunConfig, machine: int) -> Iterator[Change]:
    training, options = config.training, config.training.megatron
    ranks = training.world_size
    if not options.get("use_distributed_optimizer"):
        yield {"training.megatron.use_distributed_optimizer": True}
    for name in ("tensor_model", "expert_model", "pipeline_model", "context"):
        option = f"{name}_parallel_size"
        size = int(options.get(option) or 1) * 2
        while size <= (machine if name == "tensor_model" else ranks):
            sequence = {"training.megatron.sequence_parallel": True} if name == "tensor_model" else {}
            yield {f"training.megatron.{option}": size, **sequence}
            size *= 2


def more_ranks(config: RunConfig, times: int) -> Change:
    """Return a change to more training GPUs, and where these are shared, to as many times more rollout engines."""
    change: Change = {"training.world_size": config.training.world_size * times}
    if config.fleet.colocate:
        change["rollout.num_engines"] = config.rollout.num_engines * times
    return change


def _with(values: dict[str, Any], change: Change) -> dict[str, Any]:
    """Return a copy with some options changed."""
    changed = {name: dict(section) if isinstance(section, dict) else section for name, section in values.items()}
    for option, value in change.items():
        *sections, name = option.split(".")
        place = changed
        for section in sections:
            place[section] = dict(place.get(section) or {})
            place = place[section]
        place[name] = value
    return changed


def _excess(plan: Plan) -> tuple[int, float]:
    """Return the number of problems, and the sum of the relative excess of all memories."""
    return len(plan.problems), sum(max(0.0, memory.total / memory.capacity - 1) for memory in plan.memory)


def _remedy(changes: Change, plan: Plan, full: Collection[str]) -> Remedy:
    """Return a remedy. `full`: memories that were too small before, if any."""
    candidates = [memory for memory in plan.memory if memory.of.partition(",")[0] in full] or list(plan.memory)
    fullest = max(candidates, key=lambda memory: memory.total / memory.capacity)
    return Remedy(options=changes, of=fullest.of, highest=fullest.total, capacity=fullest.capacity)
