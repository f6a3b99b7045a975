"""Planning: from a recipe and machines to a plan."""

import math
from collections.abc import Iterator
from typing import Any

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.requirements import placement_problems, weight_problems
from cairn.engines.models.configs import context_length
from cairn.engines.plan.activations import bytes_of
from cairn.engines.plan.ranks import adapter_size, is_trained, optimizer_share_on_host
from cairn.engines.plan.rates import bubble, model_size
from cairn.engines.plan.serving import serving_problems
from cairn.engines.training.needs import has_critic, scores_needed
from cairn.engines.training.options import config_problems
from cairn.flows.plan.memory import (
    EngineMemory,
    RankMemory,
    cache_plan,
    decoding,
    engine_memory,
    engine_options,
    heaviest_rank,
    host_rows,
    micro_batches,
    model_of_servers,
    most_at_once,
    optimizer_elements,
    samples_of_engine,
    serving_of,
    weight_bytes,
)
from cairn.flows.plan.remedies import remedies
from cairn.flows.plan.subject import Memory, ModelFacts, Plan, Row, StepTime, Subject, Transfer, scaled, subject_of
from cairn.flows.reading.costs import devices

# Seconds of an iteration's steps, from the rates of machines.


def step_times(
    subject: Subject, at_once: int | None, sync: Transfer | None, checkpoint: Transfer, machines: int
) -> list[StepTime]:
    """Return the seconds of each step with a notable duration. A checkpoint takes as long as the copy to the host.

    Args:
        at_once: number of samples that all rollout engines generate concurrently; None where they generate none.
    """
    times = []
    if at_once is not None:
        times.append(StepTime(step="rollout", seconds=_rollout(subject, at_once)))
    for step, seconds in (("score", _score(subject)), ("train", _train(subject))):
        if seconds:
            times.append(StepTime(step=step, seconds=seconds))
    interval = subject.config.checkpoint.save_interval or subject.config.rollout.num_rollout or 1
    host = machines * subject.hardware_of(subject.trains_on_gpu).host_gb_s * 1e9
    times.append(StepTime(step="checkpoint", seconds=checkpoint.bytes / host / interval))
    if sync is not None:
        times.append(StepTime(step="sync", seconds=sync.seconds))
    return times


def sync_of(subject: Subject) -> Transfer:
    """Return the transfer of a publication: the whole model in the rollout's number format, once an iteration, over the
    slowest link of its path."""
    config, hardware = subject.config, subject.hardware_of(subject.trains_on_gpu)
    size = subject.model.parameters * weight_bytes(subject)
    transport, share = config.fleet.update_weight_transport, config.fleet.colocate and subject.trains_on_gpu
    if transport == "store":
        seconds, how = 2 * size / (hardware.disk_gb_s * 1e9), "written to the run's store, and read: whole weights"
    elif transport == "disk":
        seconds, how = 2 * size / (hardware.disk_gb_s * 1e9), "written to a disk, and read"
    elif transport == "distributed":
        seconds, how = size / (hardware.network_gb_s * 1e9), "broadcast from one rank"
    elif share:
        seconds, how = size / (hardware.nvlink_gb_s * 1e9), "gathered on every GPU of a machine"
    else:
        seconds, how = 2 * size / (hardware.host_gb_s * 1e9), "through the memory of the host"
    return Transfer(bytes=size, seconds=seconds, how=how)


def checkpoint_of(subject: Subject, machines: int) -> Transfer:
    """Return the transfer of a checkpoint: float32 weights and two moments of trained parameters, and the weights of
    the others. Every rank writes its own part."""
    config, hardware = subject.config, subject.hardware_of(subject.trains_on_gpu)
    training, model = config.training, subject.model
    if training.lora.r:
        size = 12.0 * adapter_size(model, training.lora)
    else:
        wanted = is_trained(training)
        size = 4.0 * sum(tensor.size * (3 if wanted(tensor) else 1) for tensor in model.tensors)
    if has_critic(config.algorithm):
        size += 12.0 * model.parameters
    if config.algorithm.ref_update_interval is not None:
        size += bytes_of(training.dtype) * model.parameters
    how = f"from {machines} machine{'s' * (machines > 1)}, while the next iterations run"
    return Transfer(bytes=size, seconds=size / (machines * hardware.disk_gb_s * 1e9), how=how)


def _rollout(subject: Subject, at_once: int) -> float:
    engine, lengths, rollout = decoding(subject), subject.lengths, subject.config.rollout
    samples, each = samples_of_engine(subject), min(at_once / rollout.num_engines, most_at_once(subject))
    prompts = samples / subject.config.group_size * lengths.prompt
    sampled = engine.seconds(samples, each, lengths.prompt, lengths.response, lengths.longest_response)
    return sampled + engine.prefill(prompts)


def _train(subject: Subject) -> float:
    """Return the seconds of all optimizer steps, of the actor and, where there is one, of the critic; recomputation
    counts as another forward pass. The arithmetic of an optimizer on the host takes no time."""
    training = subject.config.training
    recomputed = training.gradient_checkpointing or training.megatron.get("recompute_granularity") == "full"
    models = 1 + has_critic(subject.config.algorithm)
    return models * (_pass(subject, 4 / 3 if recomputed else 1.0) + _host_optimizer(subject))


def _host_optimizer(subject: Subject) -> float:
    """Return the seconds in which the gradients of all optimizer steps reach an optimizer on the host, and the new
    weights come back."""
    training = subject.config.training
    if not (share := optimizer_share_on_host(training)):
        return 0.0
    size = (4 + bytes_of(training.dtype)) * share * optimizer_elements(subject.model, training, 0)
    return training.num_steps_per_rollout * size / (subject.gpu_hardware.host_gb_s * 1e9)


def _score(subject: Subject) -> float:
    """Return the seconds of a forward pass, a third of an update, for each model that scores."""
    columns = scores_needed(subject.config.algorithm, subject.config.training.num_steps_per_rollout)
    scorers = {role for role in columns.values() if not (role == "teacher" and subject.config.model.teacher_url)}
    return len(scorers) * _pass(subject, 1 / 3)


def _pass(subject: Subject, share: float) -> float:
    """Return the seconds for a share of the operations of an update on all samples of an iteration."""
    config, training, lengths = subject.config, subject.config.training, subject.lengths
    on_gpu = subject.trains_on_gpu
    flops = model_size(subject.model).training_flops([round(lengths.mean)]) * config.samples_per_rollout
    units = training.world_size * (min(1.0, training.num_gpus_per_rank) if on_gpu else training.num_threads)
    rate = units * subject.flops(on_gpu, training.dtype) * subject.hardware_of(on_gpu).mfu
    parts = int(training.megatron.get("virtual_pipeline_model_parallel_size") or 1)
    idle = bubble(training.pipeline_model_parallel_size, micro_batches(subject).count, parts)
    return share * flops / rate * (1 + idle)


def plan_recipe(config: RunConfig, recipe: str, gpu: str, **options: Any) -> Plan:
    """Return the plan of a configuration. Where it does not fit, the plan contains remedies.

    Args:
        recipe: its name.
        gpu: see `cairn.flows.plan.subject.subject_of`, also for `options`.
    """

    def planned(changed: RunConfig) -> Plan:
        return plan_of(subject_of(changed, recipe, gpu, **options))

    plan = plan_of(subject_of(config, recipe, gpu, **options))
    return plan.model_copy(update={"remedies": remedies(config, plan, planned)})


def plan_of(subject: Subject) -> Plan:
    """Return the resource needs of a recipe."""
    config, model = subject.config, subject.model
    problems = list(dict.fromkeys(layout_problems(subject)))
    rank = heaviest_rank(subject)
    generates = config.needs_rollout_engines and not config.rollout.external_urls
    engine = engine_memory(subject, _taken(subject, rank)) if generates else None
    machines = machines_of(config)
    checkpoint = checkpoint_of(subject, machines)
    memory = list(_memories(subject, rank, engine, checkpoint.bytes / machines))
    cache = cache_plan(subject, engine) if engine is not None and config.samples_responses else None
    if cache is not None and cache.samples_longest < config.rollout.num_engines:
        problems.append(
            f"the cache of a rollout engine cannot hold a sample of {subject.lengths.longest:,} tokens: raise "
            "rollout.num_gpus_per_engine or rollout.sglang.mem_fraction_static"
        )
    sync = sync_of(subject) if config.needs_rollout_engines else None
    reserved = devices(config)
    return Plan(
        recipe=subject.recipe,
        gpu=subject.gpu,
        gpus=reserved.reserved if reserved.kind == "GPU" else 0,
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
        steps=tuple(step_times(subject, cache.at_once if cache else None, sync, checkpoint, machines)),
        iterations=config.rollout.num_rollout or None,
        tokens=config.samples_per_rollout * subject.lengths.mean,
        overlapped=config.rollout.weights_lag > 0,
        problems=tuple(problems),
        assumptions=subject.assumptions,
    )


def machines_of(config: RunConfig) -> int:
    """Return the number of machines for all GPUs."""
    reserved = devices(config)
    return 1 if reserved.kind == "CPU" else max(1, math.ceil(reserved.reserved / config.rollout.num_gpus_per_node))


def publications_of(config: RunConfig) -> int:
    """Return the number of copies of the weights in Ray's object store: one in use, one being written, and those of the
    lag. A trainer that broadcasts without a lag, or writes folders, stores none."""
    transport, lag = config.fleet.update_weight_transport, config.rollout.weights_lag
    return lag + 2 if transport == "tensor" or (transport == "distributed" and lag) else 0


def layout_problems(subject: Subject) -> Iterator[str]:
    """Yield sentences on sizes that the layout does not divide, and on resources that no machine could place."""
    config, model = subject.config, subject.model
    yield from placement_problems(config)
    yield from weight_problems(config)
    yield from config_problems(config.training, model.config)
    context, lengths = context_length(model.config), subject.lengths
    if lengths.longest > context:
        yield (
            f"the longest sample has {lengths.longest:,} tokens, but the model's context has {context:,}: lower "
            "rollout.rollout_max_prompt_len or rollout.rollout_max_response_len"
        )
    if config.needs_rollout_engines and not config.rollout.external_urls:
        yield from subject.engine_kind.layout_problems(config.rollout)
        served = model_of_servers(subject)
        if {*served.tensors} != {*model.tensors}:
            yield (
                f"rollout.model_path is {config.rollout.model_path}, whose weights have other names or shapes than "
                f"those of {config.model.path}: use a folder of the model that is trained"
            )
        elif subject.engine_kind.spans_gpus:
            yield from serving_problems(served, serving_of(subject), engine_options(subject))


def _taken(subject: Subject, rank: RankMemory) -> float:
    """Return the bytes that training holds on GPUs that it shares with rollout engines."""
    fleet = subject.config.fleet
    if not (fleet.colocate and subject.trains_on_gpu):
        return 0.0
    process = subject.gpu_hardware.reserved_gb * 1e9
    return process if fleet.offloads_train else process + sum(row.bytes for row in rank.state)


def _stored_weights(subject: Subject) -> Iterator[Row]:
    """Yield what a machine holds of the weights that sync steps store. Ranks take buckets in turn."""
    config, training = subject.config, subject.config.training
    if not config.needs_rollout_engines or config.checkpoint.store_weights is False:
        return
    rollout, size = config.rollout, subject.model.parameters * bytes_of(config.rollout.dtype)
    share = min(1.0, rollout.num_gpus_per_node / training.world_size) if subject.trains_on_gpu else 1.0
    yield Row(what="the last stored weights, and the next while they are written", bytes=2 * share * size)
    if config.fleet.update_weight_transport == "store" and subject.engine_kind.copies_stored:
        fit = (
            int(rollout.num_gpus_per_node // max(1, rollout.num_gpus_per_engine)) if subject.rolls_out_on_gpu else None
        )
        engines = rollout.num_engines if fit is None else min(rollout.num_engines, max(1, fit))
        yield Row(what="the engines' copies of stored weights", bytes=engines * size)


def _memories(subject: Subject, rank: RankMemory, engine: EngineMemory | None, copied: float) -> Iterator[Memory]:
    """`copied`: bytes of a checkpoint that a machine writes."""
    config, training = subject.config, subject.config.training
    gpu = subject.gpu_hardware.memory
    shared = config.fleet.colocate and subject.trains_on_gpu and subject.rolls_out_on_gpu and engine is not None
    on_host: list[Row] = []
    process = Row(what="process of the rank", bytes=subject.hardware_of(subject.trains_on_gpu).reserved_gb * 1e9)
    if subject.trains_on_gpu:
        rows = [*rank.rows, process]
        if shared and engine is not None:
            others = engine.rows[-1:] if config.fleet.offloads_rollout else engine.rows
            rows += [Row(what=f"rollout engine: {row.what}", bytes=row.bytes) for row in others]
        each = max(1.0, 1 / training.num_gpus_per_rank)
        stage = f", pipeline stage {rank.stage}" if training.pipeline_model_parallel_size > 1 else ""
        yield Memory(of=f"a GPU that trains{stage}", rows=scaled(rows, each), capacity=gpu)
        on_host += host_rows(subject, rank)
    else:
        on_host += [Row(what=f"training: {row.what}", bytes=row.bytes * training.world_size) for row in rank.rows]
        on_host.append(Row(what="processes of the ranks", bytes=process.bytes * training.world_size))
    on_host.append(Row(what="a copy of the state while it is written", bytes=copied))
    on_host += _stored_weights(subject)
    if engine is not None:
        count = config.rollout.num_engines
        if subject.rolls_out_on_gpu:
            rows = list(engine.rows)
            if taken := _taken(subject, rank):
                rows.append(Row(what="training", bytes=taken))
            each = max(1.0, 1 / config.rollout.num_gpus_per_engine)
            yield Memory(of="a GPU that generates", rows=scaled(rows, each), capacity=gpu)
        else:
            on_host += [Row(what=f"rollout: {row.what}", bytes=row.bytes * count) for row in engine.rows]
        if (copies := publications_of(config)) and not shared:
            size = copies * subject.model.parameters * weight_bytes(subject)
            on_host.append(Row(what="publications of weights", bytes=size))
    if on_host:
        whole = subject.trains_on_gpu or subject.rolls_out_on_gpu
        capacity = subject.gpu_hardware.host_memory_gb * 1e9 if whole else subject.memory_of_this_machine
        yield Memory(of="a machine's own memory", rows=tuple(on_host), capacity=capacity)
