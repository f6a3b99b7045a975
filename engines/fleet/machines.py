"""What must be on one machine, and which configurations ask for what no machine holds."""

import math
from collections.abc import Iterator

from cairn.configs.schema.run import RunConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.rollout.factory import kind_of


def ranks_together(config: RunConfig) -> int:
    """Training ranks, one after the other, that must be on one machine: whole tensor- and expert-parallel groups, which
    Megatron numbers through, and under `fleet.colocate` the ranks whose GPUs an engine uses.

    Groups of experts wider than a machine take whole machines.
    """
    training, rollout = config.training, config.rollout
    experts = _expert_ranks(training)
    if training.num_gpus_per_rank:
        experts = min(experts, rollout.num_gpus_per_node)
    shared = int(rollout.num_gpus_per_engine) if config.fleet.colocate else 0
    return math.lcm(training.tensor_model_parallel_size, experts, max(1, shared))


def placement_problems(config: RunConfig) -> Iterator[str]:
    """Sentences on ranks and engines that cannot be placed, as far as the configuration tells."""
    yield from _training_problems(config)
    rollout = config.rollout
    if not kind_of(rollout.engine).spans_gpus and rollout.num_gpus_per_engine > 1:
        yield (
            f"rollout.num_gpus_per_engine is {rollout.num_gpus_per_engine:g}, and an engine of rollout.engine="
            f"{rollout.engine} computes on one GPU: set it to 1, and rollout.num_engines higher"
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
            f"training.megatron.expert_model_parallel_size takes {experts} ranks, no multiple of a machine's {nodes}"
        )
    elif together > machine:
        yield (
            f"{together} training ranks must be on one machine for its tensor- and expert-parallel groups, and under "
            "fleet.colocate its engines, to be whole: make training.megatron.tensor_model_parallel_size, "
            "expert_model_parallel_size and rollout.num_gpus_per_engine divisors of each other within "
            f"rollout.num_gpus_per_node ({machine})"
        )


def _expert_ranks(training: TrainingConfig) -> int:
    """Ranks of one group that shares the experts of a layer."""
    options = training.megatron
    if (options.get("expert_model_parallel_size") or 1) == 1:
        return int(options.get("expert_tensor_parallel_size") or 1)
    each = options.get("expert_tensor_parallel_size") or training.tensor_model_parallel_size
    return int(options["expert_model_parallel_size"] * each)
