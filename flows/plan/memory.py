"""Memory of training ranks and of rollout engines."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, log2, prod
from typing import Any

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.plan.activations import bytes_of, output_bytes, stage_activations
from cairn.engines.plan.ranks import (
    RankParameters,
    adapter_size,
    is_trained,
    optimizer_share_on_host,
    parameters_by_stage,
    sharded,
    stages,
)
from cairn.engines.plan.rates import CacheNeed, Decoding, cache_need
from cairn.engines.plan.serving import Serving, default_static_fraction, served_parameters
from cairn.engines.plan.tensors import Model, Part
from cairn.engines.rollout.plan import served_model
from cairn.engines.training.needs import has_critic, untrained_models
from cairn.flows.plan.subject import CachePlan, Row, Subject, planned_model, scaled

# Memory of the rollout engines, and the number of samples that fit in it.


@dataclass(frozen=True)
class EngineMemory:
    """Memory of each device of a rollout engine; without GPUs, of the whole engine."""

    rows: tuple[Row, ...]
    need: CacheNeed
    pool: float
    """Bytes of the cache for keys and values."""
    serving: Serving


def engine_options(subject: Subject) -> Mapping[str, Any]:
    """Return SGLang's options of the engines; with server groups, those of the first group that decodes."""
    rollout = subject.config.rollout
    group = next((group for group in rollout.server_groups if group.worker_type != "prefill"), None)
    return {**rollout.sglang, **(group.overrides if group else {})}


def gpus_of_engine(subject: Subject) -> float:
    """Return the number of GPUs of an engine; with server groups, of an engine of the first group that decodes."""
    rollout = subject.config.rollout
    group = next((group for group in rollout.server_groups if group.worker_type != "prefill"), None)
    own = None if group is None else group.num_gpus_per_engine
    return rollout.num_gpus_per_engine if own is None else own


def serving_of(subject: Subject) -> Serving:
    """Return how an engine's ranks share its model."""
    if not subject.engine_kind.spans_gpus:
        return Serving(1)
    return Serving.of(engine_options(subject), gpus_of_engine(subject))


def model_of_servers(subject: Subject) -> Model:
    """Return the model of the folder that rollout engines load, which says how they hold weights."""
    return planned_model(served_model(subject.config)[0])[0]


def weight_bytes(subject: Subject) -> float:
    """Return the mean number of bytes of a weight that an engine holds. A server that reads an FP8 folder stores its
    FP8 weights in one byte each."""
    size, model = bytes_of(subject.config.rollout.dtype), model_of_servers(subject)
    published = getattr(model.config, "quantization_config", None) or {}
    if not subject.engine_kind.holds_as_stored or published.get("quant_method") != "fp8":
        return size
    small = sum(tensor.size for tensor in model.tensors if tensor.in_fp8)
    return (small + size * (model.parameters - small)) / model.parameters


def samples_of_engine(subject: Subject) -> float:
    """Return the number of samples of a first round for each engine."""
    rollout = subject.config.rollout
    prompts = rollout.over_sampling_batch_size or rollout.rollout_batch_size
    return prompts * subject.config.group_size / rollout.num_engines


def most_at_once(subject: Subject) -> int:
    """Return the number of samples that an engine generates concurrently at most: its limits, or the samples that it
    has."""
    rollout = subject.config.rollout
    bounds = [rollout.max_running_requests, samples_of_engine(subject)]
    bounds += [int(engine_options(subject).get("max_running_requests") or rollout.max_running_requests)]
    bounds += [getattr(rollout, subject.engine_kind.bounded_by.removeprefix("rollout."))]
    return max(1, int(min(bounds)))


def engine_memory(subject: Subject, taken: float = 0.0) -> EngineMemory:
    """Return the memory of an engine while it generates.

    Args:
        taken: bytes of each GPU that other processes hold when a server starts.
    """
    rollout, serving = subject.config.rollout, serving_of(subject)
    options, size = engine_options(subject), bytes_of(rollout.dtype)
    if str(options.get("kv_cache_dtype", "auto")).startswith("fp8"):
        size = 1
    weights = served_parameters(subject.model, serving) * weight_bytes(subject)
    need = cache_need(subject.model, size, serving.attention)
    hardware = subject.hardware_of(subject.rolls_out_on_gpu)
    reserved = Row(what="process of the engine", bytes=hardware.reserved_gb * 1e9)
    longest, most = subject.lengths.longest, options.get("max_total_tokens")
    limit = float("inf") if most is None else int(most) / longest * need.of(longest)
    if not (subject.rolls_out_on_gpu and subject.engine_kind.reserves_cache):
        pool = min(limit, most_at_once(subject) * serving.data * need.of(longest))
        rows = (Row(what="weights", bytes=weights), Row(what="keys and values", bytes=pool), reserved)
        return EngineMemory(scaled(rows, serving.tensor), need, pool, serving)
    free = max(0.0, hardware.memory - reserved.bytes - taken)
    fraction = options.get("mem_fraction_static")
    if fraction is None:
        limits = {"max_running_requests": rollout.max_running_requests, **options}
        fraction = default_static_fraction(hardware.memory, serving, limits)
    static = free * float(fraction)
    pool = max(0.0, min(limit, static - weights))
    used = Row(what="weights", bytes=weights), Row(what="keys and values", bytes=pool)
    work = Row(what="activations and graphs of the server", bytes=free - static)
    return EngineMemory((*used, work, reserved), need, pool, serving)


def cache_plan(subject: Subject, memory: EngineMemory) -> CachePlan:
    """Return the number of samples that fit in the cache."""
    engines, groups, lengths = subject.config.rollout.num_engines, memory.serving.data, subject.lengths

    def room(tokens: float) -> int:
        return int(memory.pool / memory.need.of(tokens) + 1e-9) * groups

    longest, mean = room(lengths.longest), room(lengths.mean)
    need = memory.need
    return CachePlan(
        bytes_per_token=need.per_token,
        bytes_per_sample=need.fixed + need.windowed * need.window,
        pool=memory.pool,
        tokens=int(memory.pool / need.of(lengths.longest) * lengths.longest) * groups,
        samples_longest=longest * engines,
        samples_mean=mean * engines,
        at_once=min(most_at_once(subject), max(1, mean)) * engines,
        asked=round(samples_of_engine(subject) * engines),
    )


def decoding(subject: Subject) -> Decoding:
    """Return the model of an engine's decoding speed."""
    rollout, on_gpu = subject.config.rollout, subject.rolls_out_on_gpu
    flops = subject.flops(on_gpu, rollout.dtype) * (1 if on_gpu else rollout.num_threads)
    return Decoding(
        subject.model,
        serving_of(subject),
        weight_bytes(subject),
        bytes_of(rollout.dtype),
        subject.hardware_of(on_gpu),
        flops,
    )


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches of an optimizer step, on a rank."""

    tokens: int
    """Number of tokens of the fullest micro-batch, as far as they are on this rank."""
    count: int


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank."""

    stage: int
    """Pipeline stage of the rank."""
    state: tuple[Row, ...]
    """Memory that is held from one step to the next."""
    step: tuple[Row, ...]
    """Memory that is only held during a training step."""

    @property
    def rows(self) -> tuple[Row, ...]:
        return (*self.state, *self.step)

    @property
    def total(self) -> float:
        return sum(row.bytes for row in self.rows)


def micro_batches(subject: Subject) -> MicroBatches:
    """Return the micro-batches into which the engine splits a step's samples, if all have mean length except those of
    the fullest micro-batch, which have maximum length. A step without a length limit is one micro-batch; in a pipeline,
    one for each stage."""
    config, lengths = subject.config, subject.lengths
    training, stages = config.training, config.training.pipeline_model_parallel_size
    context = training.ranks_of_sequence
    samples = max(1, config.global_batch_size // training.data_parallel_size)
    whole = samples * lengths.longest
    if training.micro_batch_size is not None:
        size = min(training.micro_batch_size, samples)
        tokens, count = size * lengths.longest, -(-samples // size)
    elif training.max_tokens_per_gpu is not None:
        limit = training.max_tokens_per_gpu * context
        tokens = min(whole, max(limit, lengths.longest))
        count = -int(-samples * lengths.mean // limit)
    else:
        tokens, count = max(whole // stages, lengths.longest), stages
    count = -(-max(1, count) // stages) * stages
    return MicroBatches(-(-tokens // context), count)


def heaviest_rank(subject: Subject) -> RankMemory:
    """Return the memory of a rank of the pipeline stage that needs most: the first stage holds most micro-batches and
    the embedding, the last one the output layer."""
    training = subject.config.training
    ranks = (rank_memory(subject, stage) for stage in range(training.pipeline_model_parallel_size))
    return max(ranks, key=lambda rank: rank.total)


def rank_memory(subject: Subject, stage: int) -> RankMemory:
    """Return the memory of a rank of a pipeline stage."""
    config, training = subject.config, subject.config.training
    state = list(_learner_rows(subject.model, training, stage, ""))
    if has_critic(config.algorithm):
        critic, _ = planned_model(config.model.critic_path or config.model.path)
        rows = _learner_rows(critic, training, stage, "critic's ", critic=True)
        state.append(Row(what="critic, with its gradients and optimizer", bytes=sum(row.bytes for row in rows)))
    for role, path in untrained_models(config.model, config.algorithm).items():
        if role == "ref" and training.lora.r and config.model.ref_path is None:
            continue  # the model without its adapters
        frozen, _ = planned_model(path)
        parameters = rank_parameters(frozen, training, stage, trained=False)
        name = {"ref": "reference model", "teacher": "teacher"}[role]
        state.append(Row(what=name, bytes=parameters.all * bytes_of(training.dtype)))
    return RankMemory(stage, tuple(state), tuple(_step_rows(subject, stage)))


def rank_parameters(
    model: Model, training: TrainingConfig, stage: int, *, trained: bool = True, critic: bool = False
) -> RankParameters:
    """Return the parameters that a rank of a pipeline stage holds."""
    if training.engine == "torch":
        return sharded(model, training, trained=trained, critic=critic)
    return parameters_by_stage(model, training, trained=trained, critic=critic)[stage]


def _learner_rows(model: Model, training: TrainingConfig, stage: int, owner: str, *, critic: bool = False) -> list[Row]:
    """Return weights, gradients and optimizer state.

    Gradients and moments are float32 on both engines. Megatron stores weights in the number format of training; for
    bfloat16 its optimizer also has a float32 copy. Of these 6 + 12 bytes a parameter, the distributed optimizer divides
    the 12 by the number of ranks with the same parameters (Megatron-LM's `theoretical_memory_usage.py`). The share
    that `optimizer_cpu_offload` has on the host takes nothing here. torch stores float32 weights: 4 + 4 + 8 bytes. With
    LoRA everything except adapters is in the number format of training.
    """
    parameters, size = rank_parameters(model, training, stage, critic=critic), bytes_of(training.dtype)
    if training.lora.r and not critic:
        adapters = adapter_size(model, training.lora) / training.world_size
        return [
            Row(what="weights", bytes=parameters.all * size + 4 * adapters),
            Row(what="gradients of adapters", bytes=4 * adapters),
            Row(what="optimizer of adapters", bytes=8 * adapters),
        ]
    if training.engine == "torch":
        weights, optimizer = 4 * parameters.all, 8 * parameters.trained
    else:
        weights, each = size * parameters.all, 8 + (4 if size == 2 else 0)
        here = 1 - optimizer_share_on_host(training)
        optimizer = each * here * optimizer_elements(model, training, stage, critic=critic)
    return [
        Row(what=f"{owner}weights", bytes=weights),
        Row(what=f"{owner}gradients", bytes=4 * parameters.trained),
        Row(what=f"{owner}optimizer", bytes=optimizer),
    ]


def optimizer_elements(model: Model, training: TrainingConfig, stage: int, *, critic: bool = False) -> float:
    """Return the elements of parameters whose optimizer state a Megatron rank holds, on its GPU or on the host."""
    parameters, (dense, expert) = rank_parameters(model, training, stage, critic=critic), replicas(training)
    return parameters.trained_dense / dense + parameters.trained_expert / expert


def replicas(training: TrainingConfig) -> tuple[int, int]:
    """Return the number of ranks that share the optimizer state of the same parameters: for all but experts, and for
    experts."""
    options = training.megatron
    if not options.get("use_distributed_optimizer"):
        return 1, 1
    tensor, stages = training.tensor_model_parallel_size, training.pipeline_model_parallel_size
    experts = (options.get("expert_model_parallel_size") or 1) * (options.get("expert_tensor_parallel_size") or tensor)
    return training.world_size // (tensor * stages), training.world_size // (experts * stages)


def _step_rows(subject: Subject, stage: int) -> list[Row]:
    model, training, lengths = subject.model, subject.config.training, subject.lengths
    of_step = micro_batches(subject)
    last = training.pipeline_model_parallel_size - 1
    if training.engine == "torch":
        layers = range(model.config.num_hidden_layers)
    else:
        layers = stages(model.config.num_hidden_layers, training)[stage]
    activations = stage_activations(model, training, layers, stage, of_step.tokens, of_step.count, lengths.longest)
    shards = training.engine == "torch" and (training.world_size > 1 or training.dtype != "float32")
    at_output, in_layers = [], []
    if stage == last:
        trained = int(of_step.tokens * lengths.trained)
        logits = output_bytes(model, training, of_step.tokens, trained, critic=False)
        at_output.append(Row(what="logits and the output layer's input", bytes=logits))
    if activations.recomputed:
        in_layers.append(Row(what="activations of the layers that are recomputed", bytes=activations.recomputed))
    if shards:
        outside, layer = _gathered(model, training)
        at_output.append(Row(what="weights gathered from all ranks", bytes=outside))
        in_layers.append(Row(what="weights and gradients of layers gathered from all ranks", bytes=outside + layer))
    # The logits are freed when the backward pass reaches the layers.
    largest = max(at_output, in_layers, key=lambda rows: sum(row.bytes for row in rows))
    return [Row(what="activations", bytes=activations.retained), *largest]


def _gathered(model: Model, training: TrainingConfig) -> tuple[float, float]:
    """Return the bytes that FSDP2 gathers: of weights outside the layers, in the number format of training; and of two
    consecutive layers, with the gradient of one in that format and in float32."""
    size, wanted = bytes_of(training.dtype), is_trained(training)
    layers: Counter[int] = Counter()
    gradients: Counter[int] = Counter()
    outside = 0
    for tensor in model.tensors:
        if tensor.layer is None:
            outside += tensor.size
        else:
            layers[tensor.layer] += tensor.size
            gradients[tensor.layer] += tensor.size * (wanted(tensor) and not training.lora.r)
    return size * outside, size * 2 * max(layers.values()) + (size + 4) * max(gradients.values())


# Memory of a machine whose GPUs train: what its ranks hold outside their GPUs.


def host_rows(subject: Subject, rank: RankMemory) -> Iterator[Row]:
    """Yield what the training ranks of a machine hold in its own memory, at most. All of them are taken to be as large
    as `rank`."""
    config, training = subject.config, subject.config.training
    ranks = min(training.world_size, config.rollout.num_gpus_per_node)
    yield Row(what="processes of the ranks", bytes=ranks * subject.gpu_hardware.reserved_gb * 1e9)
    rounding = 0.0
    if share := optimizer_share_on_host(training):
        # HybridDeviceOptimizer, megatron-core 0.19.2: weights and moments in float32, which are not pinned; gradients
        # in float32, pinned; and pinned copies in the format of training, from which it made the weights.
        elements = ranks * share * optimizer_elements(subject.model, training, rank.stage)
        if has_critic(config.algorithm):
            critic, _ = planned_model(config.model.critic_path or config.model.path)
            elements += ranks * share * optimizer_elements(critic, training, rank.stage, critic=True)
        wide = bytes_of(training.dtype)
        yield Row(what="optimizer", bytes=12 * elements)
        yield Row(what="gradients for the optimizer", bytes=4 * elements)
        yield Row(what="copies from which the optimizer started", bytes=wide * elements)
        rounding += (4 + wide) * elements * (_rounding_of_tensors(subject.model, training) - 1)
    if config.fleet.offloads_train:
        state = [row for row in rank.state if not row.what.startswith("gradients")]
        yield Row(what="training state while others have the GPUs", bytes=ranks * sum(row.bytes for row in state))
        for row in state:
            if row.what == "weights" and training.engine == "megatron":
                parameters = rank_parameters(subject.model, training, rank.stage)
                size = row.bytes / parameters.all
                held = (size * parameters.dense, size * parameters.expert)
                rounding += ranks * sum(_rounded(part) - part for part in held)
            else:
                rounding += ranks * row.bytes * (_rounding_of_tensors(subject.model, training) - 1)
    if rounding:
        yield Row(what="pinned memory, rounded up to powers of two", bytes=rounding)


def _rounded(size: float) -> float:
    """Return the bytes that torch's allocator of pinned memory takes: the next power of two."""
    return 2.0 ** ceil(log2(size)) if size > 0 else 0.0


def _rounding_of_tensors(model: Model, training: TrainingConfig) -> float:
    """Return the factor by which pinned memory exceeds a model's tensors, each expert and each tensor-parallel part one
    by itself, in float32."""
    tensor, needed, taken = training.tensor_model_parallel_size, 0.0, 0.0
    for one in model.tensors:
        merged = one.shape[0] if one.part is Part.EXPERT and len(one.shape) == 3 else 1
        cut = tensor if one.part in (Part.CUT, Part.EMBEDDING, Part.HEAD) else 1
        each = 4 * prod(one.shape) / (merged * cut)
        needed += merged * cut * each
        taken += merged * cut * _rounded(each)
    return taken / needed
