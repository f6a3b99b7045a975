"""Collective operations and bytes by which a version of the weights leaves a Megatron trainer, from shapes alone.

`cairn.engines.weights.packing` decides what a bucket holds, here as in `cairn.engines.training.megatron.gathering`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.models.quantized import BlockFp8, Scheme
from cairn.engines.plan.ranks import stages
from cairn.engines.plan.tensors import Model, Part, Tensor
from cairn.engines.weights.packing import Packing, Whole, packings


@dataclass(frozen=True)
class Layout:
    """Sizes by which a model is divided."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int

    @classmethod
    def of(cls, training: TrainingConfig) -> "Layout":
        options, tensor = training.megatron, training.tensor_model_parallel_size
        expert_tensor = options.get("expert_tensor_parallel_size") or tensor
        expert = options.get("expert_model_parallel_size") or 1
        return cls(tensor, training.pipeline_model_parallel_size, int(expert), int(expert_tensor))


@dataclass(frozen=True)
class Exchange:
    """What a version costs on its way from the ranks to all rollout engines, whatever their number."""

    weights: int
    """Tensors in weight files."""
    nbytes: int
    """Bytes of all of them."""
    buckets: int
    """Buckets that each rank maps, or that rank 0 broadcasts in one group with all engines."""
    collectives: int
    """Collective operations that a rank takes part in to put whole weights together."""
    exchanged: int
    """Bytes of them, padding included: a rank receives all that it does not send."""
    sent: int
    """Bytes that leave the trainer, once: in the format in which rollout engines hold weights, scales included."""


def exchange_of(model: Model, training: TrainingConfig, bucket_bytes: int, scheme: Scheme | None = None) -> Exchange:
    """Return the cost of one version, put together in the training's number format.

    Args:
        scheme: quantisation of the weights that rollout engines hold; only FP8 is sent.
    """
    layout, dtype = Layout.of(training), getattr(torch, training.dtype)
    stage_of = {
        layer: stage
        for stage, layers in enumerate(stages(model.config.num_hidden_layers, training))
        for layer in layers
    }
    kinds: dict[bool, list[Whole]] = {False: [], True: []}
    for tensor in model.tensors:
        for name, shape, held in _published(tensor, layout, stage_of):
            kinds[tensor.part is Part.EXPERT].append(Whole(name, dtype, shape, held))
    members = {
        False: layout.tensor * layout.pipeline,
        True: layout.expert_tensor * layout.expert * layout.pipeline,
    }
    buckets: dict[bool, list[Packing]] = {expert: packings(weights, bucket_bytes) for expert, weights in kinds.items()}
    shared = [expert for expert, count in members.items() if count > 1]
    every = [*kinds[False], *kinds[True]]
    return Exchange(
        weights=len(every),
        nbytes=sum(weight.nbytes for weight in every),
        buckets=sum(map(len, buckets.values())),
        collectives=sum(len(one.lengths) for expert in shared for one in buckets[expert]),
        exchanged=sum(length for expert in shared for one in buckets[expert] for length in one.lengths.values()),
        sent=sum(_sent(tensor, dtype, scheme) for tensor in model.tensors),
    )


def _sent(tensor: Tensor, dtype: torch.dtype, scheme: Scheme | None) -> int:
    if not isinstance(scheme, BlockFp8) or not tensor.in_fp8:
        return tensor.size * dtype.itemsize
    *matrices, rows, columns = tensor.shape
    blocks = -(-rows // scheme.rows) * -(-columns // scheme.columns)
    return tensor.size + prod(matrices) * blocks * torch.float32.itemsize


def _published(
    tensor: Tensor, layout: Layout, stage_of: dict[int, int]
) -> Iterator[tuple[str, tuple[int, ...], dict[int, int]]]:
    """Yield a tensor, or each expert of it, under its name in weight files, with its shape and the elements that each
    member of a replica contributes."""
    stage = _stage(tensor, layout, stage_of)
    if tensor.part is Part.EXPERT:
        yield from _experts(tensor, layout, stage)
    elif tensor.part in (Part.WHOLE, Part.END):
        yield tensor.name, tensor.shape, {stage * layout.tensor: tensor.size}
    else:
        yield tensor.name, tensor.shape, _even(tensor.size, stage * layout.tensor, layout.tensor)


def _stage(tensor: Tensor, layout: Layout, stage_of: dict[int, int]) -> int:
    if tensor.layer is not None:
        return stage_of[tensor.layer]
    return 0 if tensor.part is Part.EMBEDDING else layout.pipeline - 1


def _experts(tensor: Tensor, layout: Layout, stage: int) -> Iterator[tuple[str, tuple[int, ...], dict[int, int]]]:
    """Yield the experts of a tensor in which the library has put all experts of a layer together."""
    count, *shape = tensor.shape
    prefix, _, name = tensor.name.rpartition(".")
    parts = ["gate_proj", "up_proj"] if name.startswith("gate_up_proj") else [name]
    for expert in range(count):
        rank = stage * layout.expert + expert * layout.expert // count
        for part in parts:
            size = prod(shape) // len(parts)
            held = _even(size, rank * layout.expert_tensor, layout.expert_tensor)
            yield f"{prefix}.{expert}.{part}.weight", (size,), held


def _even(size: int, first: int, members: int) -> dict[int, int]:
    each = -(-size // members)
    return {first + place: min(each, size - place * each) for place in range(members)}


# Collective operations of other trainers, counted by reading their sources: one for each of Megatron's parameters.


@dataclass(frozen=True)
class Parameters:
    """Megatron's parameters of a model: projections of queries, keys and values are one, and so are a gate and its
    input projection."""

    dense: int
    cut: int
    """Dense ones that are divided over tensor-parallel ranks."""
    experts: int
    """Weights of experts: two for each expert and layer."""


def parameters_of(model: Model) -> Parameters:
    """Return the counts for a model whose layers have a grouped attention."""
    dense = [one for one in model.tensors if one.part is not Part.EXPERT and not _fused(one)]
    cut = [one for one in dense if one.part in (Part.CUT, Part.EMBEDDING, Part.HEAD)]
    routed = [one for one in model.tensors if one.part is Part.EXPERT]
    return Parameters(len(dense), len(cut), sum(one.shape[0] for one in routed))


def _fused(tensor: Tensor) -> bool:
    """Return whether Megatron holds a tensor as a part of one that another tensor stands for."""
    return tensor.name.endswith(
        (
            "k_proj.weight",
            "v_proj.weight",
            "k_proj.bias",
            "v_proj.bias",
            "mlp.up_proj.weight",
            "_experts.up_proj.weight",
        )
    )


def slime_collectives(model: Model, training: TrainingConfig) -> int:
    """Return the collective operations of a rank in slime's `HfWeightIteratorDirect` (624b824,
    slime/backends/megatron_utils/update_weight/hf_weight_iterator_direct.py, `_get_megatron_full_params`): a broadcast
    of each parameter over pipeline stages, and of each expert's over expert-parallel ranks, and an all-gather of each
    that is cut over tensor-parallel ranks."""
    layout, counts = Layout.of(training), parameters_of(model)
    total = counts.cut * (layout.tensor > 1) + counts.experts * (layout.expert_tensor > 1)
    if layout.pipeline > 1:  # of experts, those whose source is in the rank's own pipeline
        total += counts.dense + counts.experts // layout.expert
    return total + counts.experts * (layout.expert > 1)


def nemo_rl_collectives(model: Model, training: TrainingConfig) -> int:
    """Return the collective operations of a rank in the export of Megatron-Bridge (067f987,
    src/megatron/bridge/models/conversion/param_mapping.py: `broadcast_from_pp_rank`, `gather_from_tp_ranks`,
    `gather_from_ep_ranks`), which NeMo-RL (7ea279a, nemo_rl/models/policy/workers/megatron_policy_worker.py,
    `_iter_params_with_optional_kv_scales`) iterates over. A gather over expert-parallel ranks returns one expert of
    each."""
    layout, counts = Layout.of(training), parameters_of(model)
    experts = counts.experts // layout.expert
    total = counts.cut * (layout.tensor > 1) + experts * (layout.expert_tensor > 1)
    return total + (counts.dense + experts) * (layout.pipeline > 1) + experts * (layout.expert > 1)
