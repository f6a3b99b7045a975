"""Parameters that each rank of a layout holds."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cairn.configs.schema.training import LoraConfig, TrainingConfig
from cairn.engines.plan.tensors import Model, Part, Tensor


@dataclass(frozen=True)
class RankParameters:
    """Elements of parameters on a rank. Experts count apart, because fewer ranks hold the same experts."""

    dense: float
    expert: float = 0
    trained_dense: float = 0
    trained_expert: float = 0

    @property
    def all(self) -> float:
        return self.dense + self.expert

    @property
    def trained(self) -> float:
        return self.trained_dense + self.trained_expert


def is_trained(training: TrainingConfig) -> Callable[[Tensor], bool]:
    """Return a function that says whether the actor's optimizer changes a tensor, by the lists that freeze
    parameters."""
    only, frozen = training.only_train_params_name_list, training.freeze_params_name_list

    def trained(tensor: Tensor) -> bool:
        if only:
            return any(re.search(pattern, tensor.name) for pattern in only)
        return not any(re.search(pattern, tensor.name) for pattern in frozen)

    return trained


def stages(layers: int, training: TrainingConfig) -> list[range]:
    """Return the range of layer numbers of each pipeline stage.

    Layers are divided evenly, except where options set the number of layers of the first or last stage, or count the
    embedding or the loss as a layer. In a virtual pipeline a stage has other layers than these, but as many. A
    `pipeline_model_parallel_layout` is treated as an even division.
    """
    options, count = training.megatron, training.pipeline_model_parallel_size
    sizes: dict[int, int] = {}
    for stage, end in ((0, "first"), (count - 1, "last")):
        if (count_of_end := options.get(f"num_layers_in_{end}_pipeline_stage")) is not None:
            sizes[stage] = int(count_of_end)
    counted = {
        0: bool(options.get("account_for_embedding_in_pipeline_split", False)),
        count - 1: bool(options.get("account_for_loss_in_pipeline_split", False)),
    }
    left = layers + sum(counted.values()) - sum(sizes.values())
    others = [stage for stage in range(count) if stage not in sizes]
    for place, stage in enumerate(others):
        even = left // len(others) + (place < left % len(others))
        sizes[stage] = even - counted.get(stage, False)
    firsts = [sum(sizes[earlier] for earlier in range(stage)) for stage in range(count)]
    return [range(first, first + sizes[stage]) for stage, first in enumerate(firsts)]


def optimizer_share_on_host(training: TrainingConfig) -> float:
    """Return the share of the optimizer's state that is in the memory of the host."""
    options = training.megatron
    return float(options.get("optimizer_offload_fraction", 1.0)) if options.get("optimizer_cpu_offload") else 0.0


def parameters_by_stage(
    model: Model, training: TrainingConfig, *, trained: bool = True, critic: bool = False
) -> list[RankParameters]:
    """Return what a Megatron rank of each pipeline stage holds, as `cairn.engines.training.megatron.weights` divides
    it.

    Experts are divided over EP × ETP ranks, other matrices over TP ranks. The vocabulary is padded to a multiple of the
    TP ranks.

    Args:
        critic: count a value head of hidden size + 1 in place of the output layer, and an embedding of its own.
    """
    tensor, options = training.tensor_model_parallel_size, training.megatron
    experts = (options.get("expert_model_parallel_size") or 1) * (options.get("expert_tensor_parallel_size") or tensor)
    count, wanted = training.pipeline_model_parallel_size, is_trained(training)
    by_stage = []
    for stage, layers in enumerate(stages(model.config.num_hidden_layers, training)):
        sizes = dict.fromkeys(("dense", "expert", "trained_dense", "trained_expert"), 0.0)
        for one in _of_stage(model, layers, first=stage == 0, last=stage == count - 1, critic=critic):
            size = _share(one, tensor, experts)
            kind = "expert" if one.part is Part.EXPERT else "dense"
            sizes[kind] += size
            sizes[f"trained_{kind}"] += size * (trained and (critic or wanted(one)))
        if critic and stage == count - 1:
            sizes["dense"] += model.config.hidden_size + 1
            sizes["trained_dense"] += model.config.hidden_size + 1
        by_stage.append(RankParameters(**sizes))
    return by_stage


def _of_stage(model: Model, layers: Sequence[int], *, first: bool, last: bool, critic: bool) -> Iterator[Tensor]:
    """Yield the tensors of a stage. An embedding that is tied to the output layer is on the last stage too."""
    for tensor in model.tensors:
        match tensor.part:
            case Part.EMBEDDING:
                there = first or (last and model.tied and not critic)
            case Part.HEAD:
                there = last and not critic
            case Part.END:
                there = last
            case _:
                there = tensor.layer in layers
        if there:
            yield tensor


def _share(tensor: Tensor, ranks: int, experts: int) -> float:
    match tensor.part:
        case Part.EMBEDDING | Part.HEAD:
            return -(-tensor.shape[0] // ranks) * tensor.size / tensor.shape[0]
        case Part.EXPERT:
            return tensor.size / experts
        case Part.CUT:
            return tensor.size / ranks
    return tensor.size


def sharded(model: Model, training: TrainingConfig, *, trained: bool = True, critic: bool = False) -> RankParameters:
    """Return what the first rank holds where FSDP2 divides the first axis of every tensor into equal parts, rounded
    up."""
    ranks, wanted = training.world_size, is_trained(training)
    tensors = [one for one in model.tensors if not (critic and one.part is Part.HEAD)]
    sizes = [(-(-one.shape[0] // ranks) * one.size // one.shape[0], one) for one in tensors]
    head = model.config.hidden_size + 1 if critic else 0
    changed = sum(size for size, one in sizes if critic or wanted(one)) + head if trained else 0
    return RankParameters(sum(size for size, _ in sizes) + head, trained_dense=changed)


def adapter_size(model: Model, lora: LoraConfig) -> int:
    """Return the elements of LoRA's adapters: r × (in + out) for each target matrix (Hu et al., "LoRA", 2022, section
    4.1).

    Experts that are merged into one tensor get no adapter.
    """
    targets = lora.target_modules
    size = 0
    for tensor in model.tensors:
        module = tensor.name.removesuffix(".weight")
        named = targets == "all-linear" or any(module == name or module.endswith(f".{name}") for name in targets)
        if named and len(tensor.shape) == 2 and tensor.part in (Part.CUT, Part.WHOLE):
            size += lora.r * sum(tensor.shape)
    return size
