"""Preparation of a training rank's process before it computes, the same for any engine."""

import os

import torch
import torch.distributed as dist

from cairn.configs.schema.training import TrainingConfig

# Environment variables for bit-identical results on a GPU. They are not needed on a CPU.
#
# | variable | read by | effect |
# |---|---|---|
# | `CUBLAS_WORKSPACE_CONFIG` | cuBLAS | a workspace of fixed size, so that the same kernels are chosen |
# | `NCCL_ALGO` | NCCL, and Megatron's `deterministic_mode`, which requires it | sums in the order of a ring |
# | `NVTE_ALLOW_NONDETERMINISTIC_ALGO` | Transformer Engine | backward passes of attention without atomic sums |
# | `FLASH_ATTENTION_DETERMINISTIC` | FlashAttention as transformers calls it | the same |
#
# In addition, PyTorch runs with deterministic algorithms, and megatron-core with its `deterministic_mode`.
# `cairn.tasks.trainer.self_test` tests whether this suffices on a machine.


ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}


def prepare_environment(training: TrainingConfig, device: torch.device | str) -> None:
    """Set the environment variables of this process, before it creates a process group or runs its first kernel."""
    if training.deterministic_mode and torch.device(device).type != "cpu":
        os.environ.update(ENVIRONMENT)


def prepare_process(training: TrainingConfig, device: torch.device) -> None:
    """Set the number of threads on the CPU; apply `training.deterministic_mode` on a GPU."""
    if device.type == "cpu":
        torch.set_num_threads(training.num_threads)
    prepare_environment(training, device)
    if training.deterministic_mode and device.type != "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def join_process_group(world_size: int) -> None:
    """Create a process group of this process alone where `world_size` is 1; otherwise check that one exists.

    Raises:
        ValueError: no process group of `world_size` ranks exists.
    """
    if not dist.is_initialized() and world_size == 1:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not dist.is_initialized() or dist.get_world_size() != world_size:
        raise ValueError(f"training.world_size is {world_size}: create a process group of as many ranks first")
