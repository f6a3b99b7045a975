"""Weights of a loaded model under the names and in the parts that its weight files have.

Some families use other names in the library, and the library merges many weights into one tensor, such as all experts
of a layer. Trainers publish weights in the form of the files, so that every rollout engine can read them.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

_ROUTER_BIAS = "e_score_correction_bias"
_PUBLISHED_ROUTER_BIAS = ".ffn.gate.bias"
"""Suffix of its name in the files of DeepSeek V4."""

_RENAMED = {
    "deepseek_v4": (
        (r"^model\.embed_tokens\.", "embed."),
        (r"^model\.hc_head\.hc_", "hc_head_"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"^model\.", ""),
    ),
}
"""Substitutions, by model type, that make the published names of those that the library writes. It reads both."""


@dataclass(frozen=True)
class Part:
    """A weight of the files, as a contiguous part of a tensor of the model."""

    name: str
    start: int
    """Elements of the flattened tensor before this part."""
    shape: torch.Size

    @property
    def end(self) -> int:
        return self.start + self.shape.numel()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part as a view of the model's tensor."""
        if self.shape == tensor.shape:
            return tensor
        return tensor.view(-1)[self.start : self.end].view(self.shape)


def is_exact(name: str) -> bool:
    """Whether a weight stays in float32 where others are rounded.

    This is the bias by which a router chooses experts: rounding it would change the choice.
    """
    return name.endswith((_ROUTER_BIAS, _PUBLISHED_ROUTER_BIAS))


def saved_buffers(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the buffers that weight files contain, with their names."""
    saved = model.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return all tensors that weight files contain, by their names in the model; tied parameters count once."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *saved_buffers(model))}


def writes_other_names(model: PreTrainedModel) -> bool:
    """Whether the library writes weights of this model under other names than the published ones."""
    return model.config.model_type in _RENAMED


def _published_name(model: PreTrainedModel, name: str) -> str:
    for pattern, replacement in _RENAMED.get(model.config.model_type, ()):
        name = re.sub(pattern, replacement, name)
    return name


def published_parts(
    model: PreTrainedModel, named_tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, tuple[Part, ...]]:
    """Return the weights of the files that each tensor consists of, by the tensor's name in the model.

    A tensor that is not a plain concatenation of such weights is one part under its own name.
    """
    outlines = {name: torch.empty(tensor.shape, device="meta") for name, tensor in named_tensors}
    parts: dict[int, list[Part]] = {}
    with _SlicesStayViews():
        weights = revert_weight_conversion(model, dict(outlines))
    for name, weight in weights.items():
        whole = weight if weight._base is None else weight._base
        if weight.is_contiguous():
            parts.setdefault(id(whole), []).append(
                Part(_published_name(model, name), int(weight.storage_offset()), weight.shape)
            )
    return {name: tuple(parts.get(id(outline), [Part(name, 0, outline.shape)])) for name, outline in outlines.items()}


def keep_conversions(model: Any) -> None:
    """Store in a model that was made from its config how the names and parts of its weight files follow from its own.

    The library does so for models that it loads. For others it goes by the name of the class, which sharding changes.
    """
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [each for each in conversions if not isinstance(each, PrefixChange)] or None


class _SlicesStayViews(TorchFunctionMode):
    """Lets the library cut tensors without copies, so that each part tells where it comes from. Transposed tensors are
    copied."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous and [*args[0].stride()] == sorted(args[0].stride(), reverse=True):
            return args[0]
        return func(*args, **(kwargs or {}))


def published_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return views of all weights of the files, by their names there."""
    tensors = saved_tensors(model)
    parts = published_parts(model, tensors.items())
    return {part.name: part.of(tensor) for name, tensor in tensors.items() for part in parts[name]}


# Router biases that balance the load of experts. Together with a router's scores they decide which experts are chosen,
# but they do not enter the weights of the chosen experts (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2).
#
# No gradient trains them, and the library holds them as buffers. A step may move them by its token counts.


def biases_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the router biases of a transformers model, or of a part of it, with their names."""
    return ((name, value) for name, value in module.named_buffers() if name.rpartition(".")[2] == _ROUTER_BIAS)


def rebalanced(bias: torch.Tensor, tokens: torch.Tensor, rate: float) -> torch.Tensor:
    """Return the biases [experts] after a step.

    The bias falls by `rate` for experts that more tokens chose than the mean, and rises by it for experts that fewer
    chose (Megatron-core's `get_updated_expert_bias`).

    Args:
        tokens: [experts] number of tokens that chose each expert, over all ranks.
    """
    counted = tokens.to(torch.float32)
    return bias + rate * torch.sign(counted.mean() - counted)


# Multi-token prediction: layers of a model that predict several tokens ahead. They stay unchanged.
#
# | names | models |
# |---|---|
# | `model.layers.N.…`, N at or above `num_hidden_layers` | DeepSeek V3, Kimi K2, GLM-4.5 and later |
# | `mtp.…` | Qwen3-Next, Qwen3.5 |
# | `model.mtp_layers.…` | MiMo |
#
# No engine trains them, and transformers silently drops them when it loads a model. They are not part of a state, a
# checkpoint or a checksum of weights, which cover what was trained. Every model folder that a run writes contains them
# again, copied from the folder from which the run began.


def is_mtp(name: str, layers: int) -> bool:
    """Whether a tensor belongs to a layer for multi-token prediction. `layers`: hidden layers of the model."""
    layer = re.match(r"model\.(?:language_model\.)?layers\.(\d+)\.", name)
    return bool(re.match(r"(model\.)?(mtp|mtp_layers)\.", name)) or (layer is not None and int(layer[1]) >= layers)
