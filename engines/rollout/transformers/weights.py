"""Replacing a model's weights in place, all or none."""

import torch
from transformers import PreTrainedModel

from cairn.engines.errors import EngineError
from cairn.engines.rollout.transformers.experts import expert_views


class WeightUpdate:
    """One update of every parameter of a model, sent in buckets.

    Buffers that belong to the saved model may be sent too; tied parameters are one, under any of their names. Experts
    that the model holds in one tensor may be sent one by one.
    """

    def __init__(self, model: PreTrainedModel, version: int) -> None:
        self.version = version
        self._experts = expert_views(model)
        self._fused_in = {part: name for name, parts in self._experts.items() for part in parts}
        self._targets = model.state_dict(keep_vars=True)
        for parts in self._experts.values():
            self._targets |= parts
        self._missing = {id(parameter): name for name, parameter in model.named_parameters()}
        self.apart: set[str] = set()
        """Fused tensors whose experts came one by one."""

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
            self._take_apart(self._fused_in.get(name))
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

    def _take_apart(self, fused: str | None) -> None:
        """From the first of its experts on, all of a fused tensor's are missing rather than the tensor itself."""
        if fused is not None and fused not in self.apart:
            self.apart.add(fused)
            if self._missing.pop(id(self._targets[fused]), None):
                self._missing |= {id(view): name for name, view in self._experts[fused].items()}
