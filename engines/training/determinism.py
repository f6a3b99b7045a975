"""What makes a GPU give the same bits twice: kernels, collectives and attention that do.

| variable | who reads it | what it does |
|---|---|---|
| `CUBLAS_WORKSPACE_CONFIG` | cuBLAS | a workspace of fixed size, so that the same kernels are chosen |
| `NCCL_ALGO` | NCCL, and Megatron's `deterministic_mode`, which asks for it | sums in the order of a ring |
| `NVTE_ALLOW_NONDETERMINISTIC_ALGO` | Transformer Engine | backward passes of attention without atomic sums |
| `FLASH_ATTENTION_DETERMINISTIC` | FlashAttention as transformers calls it | the same |

Beside them PyTorch is asked for deterministic algorithms, and megatron-core for its `deterministic_mode`. Nothing of it
is needed on a CPU. Whether it suffices on a machine, `cairn.tasks.self_test` tries.
"""

import os

import torch

from cairn.configs.schema.training import TrainingConfig

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
