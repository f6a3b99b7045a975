"""Megatron's layers from PyTorch's modules on a GPU without Transformer Engine: what runs on a CPU, on CUDA.

A machine of a GPU alone can so test and measure everything of the Megatron engine but Transformer Engine's kernels. No
run uses this: without Transformer Engine its engine does not start on a GPU.
"""

from functools import cache

import torch

from cairn.engines.training.megatron.backend import Backend, without_transformer_engine
from cairn.engines.training.megatron.cpu import _patch_optimizer_step


def torch_modules(device: torch.device) -> Backend:
    """Return the backend of a GPU, to take the place of `cairn.engines.training.megatron.backend._gpu`."""
    _complete_megatron()
    return without_transformer_engine(device, "nccl")


@cache
def _complete_megatron() -> None:
    """Apply the patch that concerns a missing Transformer Engine, not a missing GPU."""
    _patch_optimizer_step()
