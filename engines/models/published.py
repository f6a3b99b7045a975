"""The weights of a loaded model as its weight files have them: by other names for some families, and one by one where
the library holds many in one tensor, as it does all experts of a layer.

Trainers give weights out in this way, so that every rollout engine knows them, whatever it is made of.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


@dataclass(frozen=True)
class Part:
    """A weight of the files, as a contiguous part of a tensor of the model."""

    name: str
    start: int
    """Elements of the flattened tensor before it."""
    shape: torch.Size

    @property
    def end(self) -> int:
        return self.start + self.shape.numel()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of the whole tensor."""
        if self.shape == tensor.shape:
            return tensor
        return tensor.view(-1)[self.start : self.end].view(self.shape)


def is_exact(name: str) -> bool:
    """Whether a weight stays in float32 where others are rounded: the bias by which a router chooses experts, which
    rounding would have choose others."""
    return name.endswith("e_score_correction_bias")


def saved_buffers(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that weight files have too."""
    saved = model.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All that weight files have, by its name in the model, tied parameters once."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *saved_buffers(model))}


def published_parts(
    model: PreTrainedModel, named_tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, tuple[Part, ...]]:
    """Of each of a model's tensors, by its name there, the weights that it is made of. One that is not simply made of
    some goes by its own name."""
    outlines = {name: torch.empty(tensor.shape, device="meta") for name, tensor in named_tensors}
    found: dict[int, list[Part]] = {}
    for name, weight in revert_weight_conversion(model, dict(outlines)).items():
        whole = weight if weight._base is None else weight._base
        found.setdefault(id(whole), []).append(Part(name, int(weight.storage_offset()), weight.shape))
    return {name: tuple(found.get(id(outline), [Part(name, 0, outline.shape)])) for name, outline in outlines.items()}


def published_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Views of all that weight files have, by its name there."""
    tensors = saved_tensors(model)
    parts = published_parts(model, tensors.items())
    return {part.name: part.of(tensor) for name, tensor in tensors.items() for part in parts[name]}


# The biases that balance the experts of a model: beside a router's scores they decide who is chosen, and they have no
# part in the weights of those who are (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2).
#
# No gradient trains them, and the library holds them as buffers. A step may move them by the tokens that it has seen.


_NAME = "e_score_correction_bias"


def biases_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of a model of transformers, or of a part of it, with their names."""
    return ((name, value) for name, value in module.named_buffers() if name.rpartition(".")[2] == _NAME)


def rebalanced(bias: torch.Tensor, tokens: torch.Tensor, rate: float) -> torch.Tensor:
    """[experts]: the biases after a step. Those of experts that more tokens chose than the mean fall by the rate, of
    those that fewer chose rise (Megatron-core's `get_updated_expert_bias`).

    Args:
        tokens: [experts] that chose each, of all ranks.
    """
    counted = tokens.to(torch.float32)
    return bias + rate * torch.sign(counted.mean() - counted)


# Layers of a model that predict several tokens ahead (multi-token prediction): kept as they are.
#
# | names | models |
# |---|---|
# | `model.layers.N.…`, N at or above `num_hidden_layers` | DeepSeek V3, Kimi K2, GLM-4.5 and later |
# | `mtp.…` | Qwen3-Next, Qwen3.5 |
# | `model.mtp_layers.…` | MiMo |
#
# No engine trains them, and transformers drops them in silence when it loads a model. They are no part of a state, a
# checkpoint or a checksum of weights, which say what was trained; every folder that a run writes has them again, from
# the folder that the run began with.


def is_mtp(name: str, layers: int) -> bool:
    """Whether a tensor belongs to such a layer of a model of so many hidden layers."""
    layer = re.match(r"model\.(?:language_model\.)?layers\.(\d+)\.", name)
    return bool(re.match(r"(model\.)?(mtp|mtp_layers)\.", name)) or (layer is not None and int(layer[1]) >= layers)
