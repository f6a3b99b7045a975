"""A training rank's process: its preparation before it computes, and what it tells those of other ranks."""

from typing import TypeVar

import torch
import torch.distributed as dist

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.processes.libraries import prepare_trainer

T = TypeVar("T")


def prepare_process(training: TrainingConfig, device: torch.device) -> None:
    """Set the environment variables, and the number of threads on the CPU; apply `training.deterministic_mode` on a
    GPU.

    `cairn.tasks.trainer.self_test` tests whether the mode suffices on a machine.
    """
    if device.type == "cpu":
        torch.set_num_threads(training.num_threads)
    prepare_trainer(training)
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


def gathered(value: T, world_size: int, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, in their order; all of them take part."""
    values = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(values, value, group=group)
    return values
