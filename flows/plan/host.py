"""Memory of a machine whose GPUs train: what its ranks hold outside their GPUs."""

from collections.abc import Iterator
from math import ceil, log2, prod

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.plan.activations import bytes_of
from cairn.engines.plan.ranks import optimizer_share_on_host
from cairn.engines.plan.tensors import Model, Part
from cairn.engines.training.needs import has_critic
from cairn.flows.plan.memory import RankMemory, optimizer_elements, rank_parameters
from cairn.flows.plan.subject import Row, Subject, planned_model


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
