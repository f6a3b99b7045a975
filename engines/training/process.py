"""What a rank of any training engine does with its process before it computes."""

import os

import torch
import torch.distributed as dist

from cairn.configs.schema.training import TrainingConfig

# What makes a GPU give the same bits twice: kernels, collectives and attention that do.
#
# | variable | who reads it | what it does |
# |---|---|---|
# | `CUBLAS_WORKSPACE_CONFIG` | cuBLAS | a workspace of fixed size, so that the same kernels are chosen |
# | `NCCL_ALGO` | NCCL, and Megatron's `deterministic_mode`, which asks for it | sums in the order of a ring |
# | `NVTE_ALLOW_NONDETERMINISTIC_ALGO` | Transformer Engine | backward passes of attention without atomic sums |
# | `FLASH_ATTENTION_DETERMINISTIC` | FlashAttention as transformers calls it | the same |
#
# Beside them PyTorch is asked for deterministic algorithms, and megatron-core for its `deterministic_mode`. Nothing of
# it is needed on a CPU. Whether it suffices on a machine, `cairn.tasks.trainer.self_test` tries.


ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}


def prepare_environment(training: TrainingConfig, device: torch.device | str) -> None:
    """Set the variables of this process, before it makes a process group or its first kernel runs."""
    if training.deterministic_mode and torch.device(device).type != "cpu":
        os.environ.update(ENVIRONMENT)


def prepare_kernels(training: TrainingConfig, device: torch.device) -> None:
    """Choose PyTorch's kernels."""
    if training.deterministic_mode and device.type != "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def prepare_process(training: TrainingConfig, device: torch.device) -> None:
    """Threads on the CPU; on a GPU what `training.deterministic_mode` asks for."""
    if device.type == "cpu":
        torch.set_num_threads(training.num_threads)
    prepare_environment(training, device)
    prepare_kernels(training, device)


def join_process_group(world_size: int) -> None:
    """Make a group of this process alone where one rank is all there is; otherwise there must be one already.

    Raises:
        ValueError: no process group of `world_size` ranks exists.
    """
    if not dist.is_initialized() and world_size == 1:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not dist.is_initialized() or dist.get_world_size() != world_size:
        raise ValueError(f"training.world_size is {world_size}: create a process group of as many ranks first")
