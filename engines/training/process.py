"""What a rank of any training engine does with its process before it computes."""

import torch
import torch.distributed as dist

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.determinism import prepare_environment, prepare_kernels


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
