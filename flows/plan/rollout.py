"""Memory of the rollout engines, and how many samples have room in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cairn.engines.plan.activations import bytes_of
from cairn.engines.plan.kv_cache import CacheNeed, cache_need
from cairn.engines.plan.rates import Decoding
from cairn.engines.plan.serving import Serving, served_parameters, usual_static_fraction
from cairn.engines.plan.tensors import Tensor
from cairn.flows.plan.records import CachePlan, Row
from cairn.flows.plan.subject import Subject


@dataclass(frozen=True)
class EngineMemory:
    """Of each device of a rollout engine; without GPUs of the whole engine."""

    rows: tuple[Row, ...]
    need: CacheNeed
    pool: float
    """Bytes for caches."""
    serving: Serving


def engine_options(subject: Subject) -> Mapping[str, Any]:
    """SGLang's options of the engines; with groups of servers those of the first that decodes."""
    rollout = subject.config.rollout
    group = next((group for group in rollout.server_groups if group.worker_type != "prefill"), None)
    return {**rollout.sglang, **(group.overrides if group else {})}


def gpus_of_engine(subject: Subject) -> float:
    """GPUs of an engine; with groups of servers of the first that decodes."""
    rollout = subject.config.rollout
    group = next((group for group in rollout.server_groups if group.worker_type != "prefill"), None)
    own = None if group is None else group.num_gpus_per_engine
    return rollout.num_gpus_per_engine if own is None else own


def serving_of(subject: Subject) -> Serving:
    """How an engine's ranks share its model."""
    if subject.config.rollout.engine != "sglang":
        return Serving(1)
    return Serving.of(engine_options(subject), gpus_of_engine(subject))


def weight_bytes(subject: Subject) -> float:
    """Of a weight, on average. A server that reads a folder in FP8 holds the matrices of layers in a byte, but for
    routers."""
    size, model = bytes_of(subject.config.rollout.dtype), subject.model
    published = getattr(model.config, "quantization_config", None) or {}
    if subject.config.rollout.engine != "sglang" or published.get("quant_method") != "fp8":
        return size
    small = sum(tensor.size for tensor in model.tensors if is_in_fp8(tensor))
    return (small + size * (model.parameters - small)) / model.parameters


def is_in_fp8(tensor: Tensor) -> bool:
    """Whether a folder in FP8 has it so."""
    in_layer = tensor.layer is not None and len(tensor.shape) > 1
    return in_layer and not tensor.name.endswith((".gate.weight", ".router.weight"))


def samples_of_engine(subject: Subject) -> float:
    """Of a first round, of each engine."""
    rollout = subject.config.rollout
    prompts = rollout.over_sampling_batch_size or rollout.rollout_batch_size
    return prompts * subject.config.group_size / rollout.num_engines


def most_at_once(subject: Subject) -> int:
    """Samples that an engine is allowed to generate at a time, or has."""
    rollout = subject.config.rollout
    bounds = [rollout.max_running_requests, samples_of_engine(subject)]
    if rollout.engine == "sglang":
        bounds += [int(engine_options(subject).get("max_running_requests") or rollout.max_running_requests)]
        bounds += [rollout.sglang_server_concurrency]
    return max(1, int(min(bounds)))


def engine_memory(subject: Subject, taken: float = 0.0) -> EngineMemory:
    """What an engine holds while it generates.

    Args:
        taken: bytes of each GPU that others hold when a server begins.
    """
    rollout, serving = subject.config.rollout, serving_of(subject)
    options, size = engine_options(subject), bytes_of(rollout.dtype)
    if str(options.get("kv_cache_dtype", "auto")).startswith("fp8"):
        size = 1
    weights = served_parameters(subject.model, serving) * weight_bytes(subject)
    need = cache_need(subject.model, size, serving.attention)
    hardware = subject.hardware_of(subject.rolls_out_on_gpu)
    reserved = Row(what="process of the engine", bytes=hardware.reserved_gb * 1e9)
    if rollout.engine != "sglang":
        pool = most_at_once(subject) * need.of(subject.lengths.longest)
        rows = (Row(what="weights", bytes=weights), Row(what="keys and values", bytes=pool), reserved)
        return EngineMemory(rows, need, pool, serving)
    most = options.get("max_total_tokens")
    asked = float("inf") if most is None else _pool_of(need, int(most), subject)
    if not subject.rolls_out_on_gpu:
        pool = min(asked, most_at_once(subject) * serving.data * need.of(subject.lengths.longest))
        rows = (Row(what="weights", bytes=weights), Row(what="keys and values", bytes=pool), reserved)
        return EngineMemory(_times(rows, serving.tensor), need, pool, serving)
    left = max(0.0, hardware.memory - reserved.bytes - taken)
    fraction = options.get("mem_fraction_static")
    static = left * float(usual_static_fraction(hardware.memory, serving, options) if fraction is None else fraction)
    pool = max(0.0, min(asked, static - weights))
    held = Row(what="weights", bytes=weights), Row(what="keys and values", bytes=pool)
    work = Row(what="activations and graphs of the server", bytes=left - static)
    return EngineMemory((*held, work, reserved), need, pool, serving)


def cache_plan(subject: Subject, memory: EngineMemory) -> CachePlan:
    """How many samples have room."""
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
    """An engine at work."""
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


def _pool_of(need: CacheNeed, tokens: int, subject: Subject) -> float:
    longest = subject.lengths.longest
    return tokens / longest * need.of(longest)


def _times(rows: tuple[Row, ...], count: int) -> tuple[Row, ...]:
    return tuple(Row(what=row.what, bytes=row.bytes * count) for row in rows)
