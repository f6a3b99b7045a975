"""Checks of a configuration: which ways of sending weights, sharing GPUs and placing ranks its engines support."""

import math
from collections.abc import Iterable, Iterator, Mapping

from cairn.configs.catalogue import gpus_of_device, hardware
from cairn.configs.schema.run import RunConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.rollout.plan import LaunchPlan, kind_of

_HOLD_ADDRESSES = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "nccl_ub")
"""Megatron options with which training holds addresses of memory that must then not move."""


def weight_problems(config: RunConfig) -> Iterator[str]:
    """Yield sentences on what the engines cannot do."""
    yield from _colocation_problems(config)
    transport, rollout = config.fleet.update_weight_transport, config.rollout
    kind = kind_of(rollout.engine)
    if transport == "distributed" and not kind.takes_broadcasts:
        yield (
            f"fleet.update_weight_transport is distributed, which rollout.engine={rollout.engine} cannot receive: set "
            "it to tensor or disk"
        )
    if transport in ("tensor", "store") and rollout.external_urls:
        yield (
            f"fleet.update_weight_transport is {transport}, which needs servers on the machines of their engines, and "
            "rollout.external_urls run elsewhere: set it to distributed or disk"
        )
    plan = kind.plan(rollout, config.fleet.offloads_rollout)
    if transport in ("tensor", "store") and any(engine.nnodes > 1 for engine in plan.engines):
        yield (
            f"fleet.update_weight_transport is {transport}, which puts weights into the memory of an engine's first "
            "machine, and rollout.num_gpus_per_engine is above rollout.num_gpus_per_node: set it to distributed or disk"
        )
    if transport == "distributed":
        yield from _group_problems(config, plan)
    kinds = {group.worker_type for group in rollout.server_groups}
    over_gpus = any(engine.num_gpus * engine.nnodes > 1 for engine in plan.engines)
    if transport == "disk" and over_gpus and (config.fleet.offloads_rollout or kinds - {"regular"}):
        yield (
            "fleet.update_weight_transport is disk, but a server of several GPUs that released its cache or serves "
            "prefill or decode cannot report when all of them have read the folder: set it to tensor or distributed"
        )
    if config.fleet.check_weight_update_equal and not kind.reports_checksum(rollout):
        yield from comparison_problems(config)


def comparison_problems(config: RunConfig) -> Iterator[str]:
    """Yield sentences on why log-probs of rollout engines cannot be compared with the trainer's after an update."""
    option = "fleet.check_weight_update_equal compares log-probs with the trainer's"
    if config.rollout.weights_lag:
        yield f"{option}, which already has other weights with rollout.pipeline=lagged: leave it out"
    if config.fleet.offloads_train:
        yield f"{option}, whose memory offload_train has then taken: leave it out"
    if any(group.worker_type != "regular" for group in config.rollout.server_groups):
        yield f"{option}, for which each server must generate alone, which prefill and decode servers cannot"


def gpu_problem(gpu: str | None, machines: Iterable[Mapping[str, float]]) -> str | None:
    """Return a sentence on the first machine whose GPUs have less memory than those that the recipe is laid out for.

    Args:
        gpu: `fleet.gpu`.
        machines: Ray's resources of each machine. Ray names the GPUs of a machine by a resource such as
            `accelerator_type:H100`. Names that `hardware.yaml` does not have are not judged, and one that comes in
            several sizes counts as the largest.
    """
    if gpu is None:
        return None
    for name in sorted({name for machine in machines for name in machine}):
        kind, _, device = name.partition(":")
        sizes = [found.memory for found in gpus_of_device(device)] if kind == "accelerator_type" else []
        if sizes and max(sizes) < hardware(gpu).memory:
            return (
                f"fleet.gpu is {gpu}, with {hardware(gpu).memory / 2**30:.0f} GiB, and the cluster has GPUs of the "
                f"type {device}, with {max(sizes) / 2**30:.0f} GiB: find a layout for these with `cairn plan RECIPE "
                "--gpu NAME` and set fleet.gpu to them"
            )
    return None


def _group_problems(config: RunConfig, plan: LaunchPlan) -> Iterator[str]:
    """Yield sentences on the one process group of the trainer's first rank and all servers."""
    each = config.training.num_gpus_per_rank
    engine_gpus = [] if config.rollout.external_urls else [engine.num_gpus for engine in plan.engines]
    if config.fleet.colocate:
        yield (
            "fleet.update_weight_transport is distributed, but under fleet.colocate trainer and servers are on the "
            "same GPUs, and NCCL allows a GPU only once in a group: set it to tensor"
        )
    elif any(0 < gpus < 1 for gpus in (each, *engine_gpus)):
        yield (
            "fleet.update_weight_transport is distributed, but training ranks or engines with less than a GPU may "
            "share one, and NCCL allows a GPU only once in a group: set it to tensor or disk"
        )
    elif any((each > 0) != (gpus > 0) for gpus in engine_gpus):
        yield (
            "fleet.update_weight_transport is distributed, but trainer and servers are not all on GPUs or all on CPUs: "
            "set it to tensor or disk"
        )


def _colocation_problems(config: RunConfig) -> Iterator[str]:
    fleet, rollout, training = config.fleet, config.rollout, config.training
    fixed = [name for name in _HOLD_ADDRESSES if training.megatron.get(name) not in (None, False, "none")]
    if fleet.offloads_train and fixed:
        yield (
            f"fleet.colocate and offload_train release the memory of training, but training.megatron.{fixed[0]} keeps "
            "addresses in it: set one of them to false"
        )
    if (fleet.offloads_rollout or fleet.colocate) and rollout.external_urls:
        yield (
            "rollout.external_urls are servers whose memory Cairn does not control: leave fleet.colocate and "
            "offload_rollout out"
        )
    if not fleet.colocate:
        return
    wanted = int(rollout.num_engines * rollout.num_gpus_per_engine)
    if rollout.num_gpus_per_engine and training.num_gpus_per_rank != 1:
        yield f"fleet.colocate needs training.num_gpus_per_rank=1, found {training.num_gpus_per_rank:g}"
    if wanted > training.world_size:
        yield (
            f"fleet.colocate puts the rollout engines on the GPUs of training, and {rollout.num_engines} × "
            f"{rollout.num_gpus_per_engine:g} are more than training.world_size = {training.world_size}"
        )
    if rollout.num_gpus_per_engine > rollout.num_gpus_per_node or rollout.server_groups:
        yield "fleet.colocate needs engines of one kind that fit on one machine each: leave server_groups out"


# Ranks that must be on one machine, and configurations that need more than a machine has.


def ranks_together(config: RunConfig) -> int:
    """Return the number of consecutive training ranks that must be on one machine: whole tensor- and expert-parallel
    groups, which Megatron numbers consecutively, and under `fleet.colocate` the ranks whose GPUs an engine uses.

    Groups of experts wider than a machine take whole machines.
    """
    training, rollout = config.training, config.rollout
    experts = _expert_ranks(training)
    if training.num_gpus_per_rank:
        experts = min(experts, rollout.num_gpus_per_node)
    shared = int(rollout.num_gpus_per_engine) if config.fleet.colocate else 0
    return math.lcm(training.tensor_model_parallel_size, experts, max(1, shared))


def placement_problems(config: RunConfig) -> Iterator[str]:
    """Yield sentences on ranks and engines that cannot be placed, as far as the configuration shows."""
    yield from _training_problems(config)
    rollout = config.rollout
    if not kind_of(rollout.engine).spans_gpus and rollout.num_gpus_per_engine > 1:
        yield (
            f"rollout.num_gpus_per_engine is {rollout.num_gpus_per_engine:g}, and an engine of "
            f"rollout.engine={rollout.engine} computes on one GPU: set it to 1, and raise rollout.num_engines"
        )
    if config.fleet.colocate and rollout.num_gpus_per_engine % 1:
        yield (
            f"fleet.colocate gives an engine the GPUs of whole training ranks, and rollout.num_gpus_per_engine is "
            f"{rollout.num_gpus_per_engine:g}: make it a whole number"
        )


def _training_problems(config: RunConfig) -> Iterator[str]:
    training, machine = config.training, config.rollout.num_gpus_per_node
    each, tensor = training.num_gpus_per_rank, training.tensor_model_parallel_size
    if not each:
        return
    if each > 1:
        yield f"training.num_gpus_per_rank is {each:g}, and a rank computes on one GPU: set it to 1"
    elif each < 1 and training.world_size > 1:
        yield (
            f"training.num_gpus_per_rank is {each:g}, so that two of the {training.world_size} ranks would have one "
            "GPU, which NCCL refuses: set it to 1, or training.world_size to 1"
        )
    nodes = (
        f"rollout.num_gpus_per_node ({machine}): lower it, or set rollout.num_gpus_per_node to the GPUs of a machine"
    )
    experts, together = _expert_ranks(training), ranks_together(config)
    if tensor > machine:
        yield f"training.megatron.tensor_model_parallel_size ({tensor}) is above a machine's {nodes}"
    elif experts > machine and experts % machine:
        yield (
            f"training.megatron.expert_model_parallel_size takes {experts} ranks, not a multiple of a machine's {nodes}"
        )
    elif together > machine:
        yield (
            f"{together} training ranks must be on one machine to complete its tensor- and expert-parallel groups and, "
            "under fleet.colocate, its engines: make training.megatron.tensor_model_parallel_size, "
            "expert_model_parallel_size and rollout.num_gpus_per_engine divisors of each other within "
            f"rollout.num_gpus_per_node ({machine})"
        )


def _expert_ranks(training: TrainingConfig) -> int:
    """Return the number of ranks in a group that shares the experts of a layer."""
    options = training.megatron
    if (options.get("expert_model_parallel_size") or 1) == 1:
        return int(options.get("expert_tensor_parallel_size") or 1)
    each = options.get("expert_tensor_parallel_size") or training.tensor_model_parallel_size
    return int(options["expert_model_parallel_size"] * each)
