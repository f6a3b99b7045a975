"""A training state that gives its GPU memory to others for a while, and comes back bit for bit."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from cairn.engines.training.optimizer import MOMENTS


def offload(models: Sequence[PreTrainedModel], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Move models and optimizers' states to the host's memory, pinned where a GPU will fetch it. Gradients are dropped:
    the next step makes its own."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    _move(models, optimizers, "cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def onload(
    models: Sequence[PreTrainedModel], optimizers: Sequence[torch.optim.Optimizer], device: torch.device
) -> None:
    """Move what was offloaded back."""
    _move(models, optimizers, device)


def _move(
    models: Sequence[PreTrainedModel], optimizers: Sequence[torch.optim.Optimizer], device: str | torch.device
) -> None:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        on_host = torch.device(device).type == "cpu"
        if on_host and tensor.is_cuda and not isinstance(tensor, DTensor):
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        return tensor.to(device)

    with torch.no_grad():
        for model in models:
            model._apply(moved)  # what `to` does, with memory of our choice; parameters stay the same objects
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for name in MOMENTS:
                    state[name] = moved(state[name])
