"""Gathering of the distributed optimizer's state for a checkpoint, with less memory than Megatron takes."""

from typing import Any

import torch
import torch.distributed as dist

KINDS = ("param", "exp_avg", "exp_avg_sq")
"""Master weights and moments, as Megatron names them."""


def parameter_state(optimizer: Any, *, empty_data: bool = False, **_: Any) -> dict[Any, Any]:
    """Return what `DistributedOptimizer.get_parameter_state_dp_zero` of megatron-core 0.19.2 returns on every rank: for
    each buffer the float32 master weights and moments of all ranks with the same parameters, on the host.

    Megatron first copies the rank's own part of all three kinds to the host too, which without replicas doubles what it
    returns. Here a part that has no replicas is copied to its place, and others are gathered on their device.

    Args:
        empty_data: leave the tensors at 0, as for a state that is about to be loaded.
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        buffer = optimizer.buffers[index]
        ((dtype, of_buckets),) = ranges.items()
        whole: dict[str, Any] = {kind: torch.zeros(buffer.numel_unpadded, dtype=torch.float32) for kind in KINDS}
        for kind in () if empty_data else KINDS:
            begin = 0
            for bucket, of_bucket in zip(buffer.buckets, of_buckets, strict=True):
                end = begin + bucket.numel_unpadded
                _gather(optimizer, kind, bucket.grad_data, of_bucket["param_map"], whole[kind][begin:end])
                begin = end
        state[index] = {dtype: whole | {"numel_unpadded": buffer.numel_unpadded}}
    return state


def _gather(optimizer: Any, kind: str, gradients: torch.Tensor, places: dict[Any, Any], into: torch.Tensor) -> None:
    """Fill `into` with one kind of a bucket's state, float32, from all ranks of the optimizer's group."""
    group = optimizer.data_parallel_group
    ranks = group.size()
    own = into
    if ranks > 1:
        own = torch.zeros(gradients.numel() // ranks, dtype=torch.float32, device=gradients.device)
    for parameter, place in places.items():
        part = place["gbuf_local"]
        own[part.start : part.end] = optimizer._get_main_param_and_optimizer_states(parameter)[kind].detach()
    if ranks > 1:
        padded = torch.empty(gradients.numel(), dtype=torch.float32, device=gradients.device)
        dist.all_gather_into_tensor(padded, own, group=group)
        into.copy_(padded[: len(into)])
