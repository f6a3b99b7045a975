"""From a recipe and machines to a plan."""

import math
from collections.abc import Iterator
from typing import Any

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.machines import placement_problems
from cairn.engines.models import context_length
from cairn.engines.plan.serving import serving_problems
from cairn.engines.weights.options import weight_problems
from cairn.flows.costs.device_time import devices
from cairn.flows.plan.earlier import Earlier
from cairn.flows.plan.records import Memory, ModelFacts, Plan, Row
from cairn.flows.plan.remedies import remedies
from cairn.flows.plan.rollout import EngineMemory, cache_plan, engine_memory, engine_options, serving_of, weight_bytes
from cairn.flows.plan.subject import Subject, subject_of
from cairn.flows.plan.times import checkpoint_of, step_times, sync_of
from cairn.flows.plan.training import RankMemory, heaviest_rank


def plan_recipe(config: RunConfig, recipe: str, gpu: str, earlier: Earlier | None = None, **reckoned: Any) -> Plan:
    """The plan of a configuration with what would change it for the better, where it does not fit.

    Args:
        recipe: its name.
        gpu: as `cairn.flows.plan.subject.subject_of` takes it, like the rest.
        earlier: a run that lengths and times are taken from.
    """
    if earlier is not None:
        own = {
            "response_tokens": earlier.response,
            "prompt_tokens": max(1.0, earlier.sequence - earlier.response),
        }
        reckoned |= {name: value for name, value in own.items() if reckoned.get(name) is None}

    def planned(changed: RunConfig) -> Plan:
        return plan_of(subject_of(changed, recipe, gpu, **reckoned))

    plan = plan_of(subject_of(config, recipe, gpu, **reckoned), earlier)
    return plan.model_copy(update={"remedies": remedies(config, plan, planned)})


def plan_of(subject: Subject, earlier: Earlier | None = None) -> Plan:
    """What a recipe needs of its machines. `earlier`: a run that times are taken from."""
    config, model = subject.config, subject.model
    problems = list(dict.fromkeys(layout_problems(subject)))
    rank = heaviest_rank(subject)
    generates = config.needs_rollout_engines and not config.rollout.external_urls
    engine = engine_memory(subject, _taken(subject, rank)) if generates else None
    memory = list(_memories(subject, rank, engine))
    cache = cache_plan(subject, engine) if engine is not None and config.samples_responses else None
    if cache is not None and cache.samples_longest < config.rollout.num_engines:
        problems.append(
            f"the cache of a rollout engine has room for no sample of {subject.lengths.longest:,} tokens: raise "
            "rollout.num_gpus_per_engine or rollout.sglang.mem_fraction_static"
        )
    machines = machines_of(config)
    checkpoint = checkpoint_of(subject, machines)
    sync = sync_of(subject) if config.needs_rollout_engines else None
    from_rates = step_times(subject, cache.at_once if cache else None, sync, checkpoint)
    held = devices(config)
    return Plan(
        recipe=subject.recipe,
        gpu=subject.gpu,
        gpus=held.reserved if held.kind == "GPU" else 0,
        machines=machines,
        model=ModelFacts(
            name=config.model.path.rstrip("/").rpartition("/")[2],
            source=subject.source,
            architecture=model.config.model_type,
            parameters=model.parameters,
            active_parameters=model.active_parameters,
            layers=model.config.num_hidden_layers,
        ),
        memory=tuple(memory),
        cache=cache,
        sync=sync,
        checkpoint=checkpoint,
        steps=tuple(earlier.scaled(subject) if earlier else from_rates),
        overlapped=config.rollout.weights_lag > 0,
        problems=tuple(problems),
        assumptions=subject.assumptions,
    )


def machines_of(config: RunConfig) -> int:
    """That all GPUs are on."""
    held = devices(config)
    return 1 if held.kind == "CPU" else max(1, math.ceil(held.reserved / config.rollout.num_gpus_per_node))


def publications_of(config: RunConfig) -> int:
    """Copies of the weights in Ray's object store: one that is used, one that is made, and those of the lag. A trainer
    that broadcasts without one, or writes folders, keeps none."""
    transport, lag = config.fleet.update_weight_transport, config.rollout.weights_lag
    return lag + 2 if transport == "tensor" or (transport == "distributed" and lag) else 0


def layout_problems(subject: Subject) -> Iterator[str]:
    """Sentences on what the layout does not divide, or what no machine could place."""
    config, model = subject.config, subject.model
    yield from placement_problems(config)
    yield from weight_problems(config)
    if config.training.engine == "megatron":
        from cairn.engines.training.megatron.options import model_problems

        yield from model_problems(config.training, model.config)
    context, lengths = context_length(model.config), subject.lengths
    if lengths.longest > context:
        yield (
            f"the longest sample has {lengths.longest:,} tokens, and the model's context holds {context:,}: lower "
            "rollout.rollout_max_prompt_len or rollout.rollout_max_response_len"
        )
    if config.rollout.engine == "sglang" and config.needs_rollout_engines and not config.rollout.external_urls:
        from cairn.engines.rollout.sglang.launch_plan import plan_problems

        yield from plan_problems(config.rollout)
        yield from serving_problems(model, serving_of(subject), engine_options(subject))


def _taken(subject: Subject, rank: RankMemory) -> float:
    """Bytes that training holds of the GPUs that rollout engines share with it."""
    fleet = subject.config.fleet
    if not (fleet.colocate and subject.trains_on_gpu):
        return 0.0
    process = subject.gpu_hardware.reserved_gb * 1e9
    return process if fleet.offloads_train else process + sum(row.bytes for row in rank.state)


def _memories(subject: Subject, rank: RankMemory, engine: EngineMemory | None) -> Iterator[Memory]:
    config, training = subject.config, subject.config.training
    gpu = subject.gpu_hardware.memory
    shared = config.fleet.colocate and subject.trains_on_gpu and subject.rolls_out_on_gpu and engine is not None
    on_host = []
    process = Row(what="process of the rank", bytes=subject.hardware_of(subject.trains_on_gpu).reserved_gb * 1e9)
    if subject.trains_on_gpu:
        rows = [*rank.rows, process]
        if shared and engine is not None:
            others = engine.rows[-1:] if config.fleet.offloads_rollout else engine.rows
            rows += [Row(what=f"rollout engine: {row.what}", bytes=row.bytes) for row in others]
        each = max(1.0, 1 / training.num_gpus_per_rank)
        stage = f", pipeline stage {rank.stage}" if training.pipeline_model_parallel_size > 1 else ""
        yield Memory(of=f"a GPU that trains{stage}", rows=_scaled(rows, each), capacity=gpu)
        if config.fleet.offloads_train:
            ranks = min(training.world_size, config.rollout.num_gpus_per_node)
            kept = sum(row.bytes for row in rank.state if not row.what.startswith("gradients"))
            on_host.append(Row(what="training state while others have the GPUs", bytes=ranks * kept))
    else:
        on_host += [Row(what=f"training: {row.what}", bytes=row.bytes * training.world_size) for row in rank.rows]
        on_host.append(Row(what="processes of the ranks", bytes=process.bytes * training.world_size))
    if engine is not None:
        count = config.rollout.num_engines
        if subject.rolls_out_on_gpu:
            rows = list(engine.rows)
            if taken := _taken(subject, rank):
                rows.append(Row(what="training", bytes=taken))
            each = max(1.0, 1 / config.rollout.num_gpus_per_engine)
            yield Memory(of="a GPU that generates", rows=_scaled(rows, each), capacity=gpu)
        else:
            on_host += [Row(what=f"rollout: {row.what}", bytes=row.bytes * count) for row in engine.rows]
        if (copies := publications_of(config)) and not shared:
            held = copies * subject.model.parameters * weight_bytes(subject)
            on_host.append(Row(what="publications of weights", bytes=held))
    if on_host:
        whole = subject.trains_on_gpu or subject.rolls_out_on_gpu
        capacity = subject.gpu_hardware.host_memory_gb * 1e9 if whole else subject.memory_of_this_machine
        yield Memory(of="a machine's own memory", rows=tuple(on_host), capacity=capacity)


def _scaled(rows: list[Row], times: float) -> tuple[Row, ...]:
    return tuple(Row(what=row.what, bytes=row.bytes * times) for row in rows)
