"""Experts one by one, as weight files and trainers have them, of models that the library holds with all experts of a
layer in one tensor."""

from collections.abc import Container

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Fused tensors [experts, rows of all the named ones, columns]."""


def expert_views(model: PreTrainedModel) -> dict[str, dict[str, torch.Tensor]]:
    """For each fused parameter, by its name, the views that make it up, by the names of the weight files.

    Empty where the library's own mapping of weight files to the model fuses no experts in this way.
    """
    mapping = get_checkpoint_conversion_mapping(model.config.get_text_config().model_type) or []
    fused = {pattern for converter in mapping for pattern in converter.target_patterns}
    views = {}
    for name, parameter in model.named_parameters():
        prefix, _, kind = name.rpartition(".")
        if prefix.endswith("mlp.experts") and f"mlp.experts.{kind}" in fused:
            views[name] = {
                f"{prefix}.{index}.{part}.weight": rows
                for index, expert in enumerate(parameter.detach())
                for part, rows in zip(_FUSED[kind], expert.chunk(len(_FUSED[kind])), strict=True)
            }
    return views


def named_weights(model: PreTrainedModel, apart: Container[str]) -> dict[str, torch.Tensor]:
    """All parameters, tied ones once; experts one by one in place of the fused tensors that `apart` names."""
    views = expert_views(model)
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        weights |= views[name] if name in apart else {name: parameter}
    return weights
