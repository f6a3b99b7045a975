"""Replacing a model's weights in place, all or none."""

import torch
from transformers import PreTrainedModel

from engines.errors import EngineError


class WeightUpdate:
    """One update of every parameter of a model, sent in buckets.

    Buffers that belong to the saved model may be sent too; tied parameters are one, under any of their names.
    """

    def __init__(self, model: PreTrainedModel, version: int) -> None:
        self.version = version
        self._targets = model.state_dict(keep_vars=True)
        self._missing = {id(parameter): name for name, parameter in model.named_parameters()}

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
            target = self._targets[name]
            target.copy_(tensor)
            self._missing.pop(id(target), None)

    def end(self) -> None:
        """Raises: EngineError: a parameter was never sent."""
        if self._missing:
            names = sorted(self._missing.values())
            raise EngineError(
                f"The update to version {self.version} lacks {len(names)} weights, the first of them {names[0]}: send "
                "every parameter between begin and end."
            )
