"""Replacing a model's weights in place, all or none."""

import torch
from transformers import PreTrainedModel

from cairn.engines.errors import EngineError
from cairn.engines.published import published_parts, saved_tensors


class WeightUpdate:
    """One update of every weight of a model, sent in buckets.

    Weights go by the names of weight files or by those that they have in the model, where experts may be one tensor;
    tied ones are one, under any of their names.
    """

    def __init__(self, model: PreTrainedModel, version: int) -> None:
        self.version = version
        held = saved_tensors(model)
        parts = published_parts(model, held.items())
        self._targets = {part.name: part.of(tensor) for name, tensor in held.items() for part in parts[name]}
        self._missing = {*self._targets}
        names_of = {}
        """By the place of a model's tensor, the weights that it is made of."""
        for name, tensor in held.items():
            names_of[tensor.data_ptr()] = {part.name for part in parts[name]}
        self._made_of = {name: {name} for name in self._targets}
        for name, tensor in model.state_dict().items():
            self._targets.setdefault(name, tensor)
            self._made_of.setdefault(name, names_of[tensor.data_ptr()])

    @torch.no_grad()
    def load(self, named_tensors: dict[str, torch.Tensor]) -> None:
        """Copy a bucket into the model, cast to its dtype.

        Raises:
            EngineError: a name is unknown or a shape differs; nothing of the bucket was copied.
        """
        for name, tensor in named_tensors.items():
            if name not in self._targets:
                raise EngineError(f"The model has no weight {name}: trainer and rollout engine hold different models.")
            if tensor.shape != self._targets[name].shape:
                raise EngineError(
                    f"Weight {name} has shape {tuple(self._targets[name].shape)} here and {tuple(tensor.shape)} in the "
                    "update: trainer and rollout engine hold different models."
                )
        for name, tensor in named_tensors.items():
            self._targets[name].copy_(tensor)
            self._missing -= self._made_of[name]

    def end(self) -> None:
        """Raises: EngineError: a weight was never sent."""
        if self._missing:
            raise EngineError(
                f"The update to version {self.version} lacks {len(self._missing)} weights, the first of them "
                f"{min(self._missing)}: send every weight between begin and end."
            )
