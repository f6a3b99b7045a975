"""Sharding of one model over several ranks: FSDP2, and the tensors of its shards as parts of whole tensors."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from cairn.engines.training.process import join_process_group
from cairn.engines.types.errors import EngineError
from cairn.engines.weights.fingerprint import digest, fingerprint


def shard_model(
    model: PreTrainedModel, dtype: torch.dtype, world_size: int, device: torch.device, *, on_host: bool = False
) -> None:
    """Shard a model over all ranks, in place, layer by layer. Parameters keep their names and number format.

    Forward and backward run in `dtype`. The gradients of the ranks are summed, not averaged, in float32: each rank's
    loss is its share of the whole loss.

    Args:
        on_host: hold parameters and gradients in the host's memory, from which each layer's are copied to the device
            for its passes.

    Raises:
        ValueError: no process group of `world_size` ranks exists.
    """
    join_process_group(world_size)
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    place = CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host else OffloadPolicy()
    for module in [*_layers(model), model]:
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=place, reshard_after_forward=True)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other way to leave the sum undivided
        sharded.set_gradient_divide_factor(1.0)


def recompute_activations(model: PreTrainedModel) -> None:
    """Store only each layer's input for the backward pass.

    Unlike the library's own switch this needs no training mode, which would turn dropout on.
    """
    for layer in _layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of which `tensor` is this rank's shard; all ranks take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_shards(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    bucket_bytes: int,
    *,
    everywhere: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole tensors in `dtype` on a device, in their order, on rank 0 or on every rank. All ranks take part and
    must iterate to the end. The shards of tensors of about `bucket_bytes` are exchanged at a time."""
    shards: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        nbytes = tensor.numel() * dtype.itemsize
        if shards and (size + nbytes > bucket_bytes or not isinstance(tensor, DTensor)):
            yield from _exchanged(shards, device, dtype, everywhere)
            shards, size = [], 0
        if isinstance(tensor, DTensor):
            shards.append((name, tensor))
            size += nbytes
        elif everywhere or not dist.is_initialized() or dist.get_rank() == 0:
            yield name, tensor.to(device, dtype)
    if shards:
        yield from _exchanged(shards, device, dtype, everywhere)


def _exchanged(
    shards: Sequence[tuple[str, torch.Tensor]], device: torch.device, dtype: torch.dtype, everywhere: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather tensors by one collective operation: each rank sends its rows of all of them, filled up to equal parts."""
    ranks = dist.get_world_size()
    lengths = [-(-tensor.shape[0] // ranks) * (tensor.numel() // max(1, tensor.shape[0])) for _, tensor in shards]
    mine = torch.zeros(sum(lengths), dtype=dtype, device=device)
    for (_, tensor), part in zip(shards, mine.split(lengths), strict=True):
        local = local_part(tensor)[0].reshape(-1)
        part[: len(local)].copy_(local)
    if everywhere:
        gathered = torch.empty(ranks * len(mine), dtype=dtype, device=device)
        dist.all_gather_into_tensor(gathered, mine)
        every = list(gathered.split(len(mine)))
    else:
        every = [torch.empty_like(mine) for _ in range(ranks)] if dist.get_rank() == 0 else []
        dist.gather(mine, every or None, dst=0)
    if every:
        parts = zip(*(one.split(lengths) for one in every), strict=True)
        for (name, tensor), of_ranks in zip(shards, parts, strict=True):
            yield name, torch.cat(of_ranks)[: tensor.numel()].view(tensor.shape)


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this rank's part of a tensor, and its offset in elements of the flattened whole."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    local = tensor.to_local()
    return local, _first_row(tensor) * (tensor.numel() // max(1, tensor.shape[0]))


def copy_part(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Fill this rank's part of a tensor from the whole tensor."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        local.copy_(source.narrow(0, _first_row(tensor), local.shape[0]))
    else:
        tensor.copy_(source)


def add_to_part(tensor: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor, of which this rank may hold a part, and a whole one, sharded like `tensor`."""
    if not isinstance(tensor, DTensor):
        return tensor + addend
    local = tensor.to_local()
    rows = addend.narrow(0, _first_row(tensor), local.shape[0])
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local + rows, mesh, placements, shape=tensor.shape, stride=tensor.stride())


def raise_together(error: Exception | None, world_size: int, device: torch.device) -> None:
    """Raise on every rank if any rank has an error, so that no rank waits in a collective for one that failed.

    Raises:
        Exception: this rank's own error, or EngineError where only another rank failed.
    """
    if world_size > 1:
        failed = torch.tensor(int(error is not None), device=device)
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed.item() and error is None:
            raise EngineError("another rank of the training engine failed; its error says why")
    if error is not None:
        raise error


@contextmanager
def raising_together(world_size: int, device: torch.device) -> Iterator[None]:
    """Raise an error of the block, or of another rank's block, after the block on every rank: see `raise_together`."""
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        error = failure
    raise_together(error, world_size, device)


def _first_row(tensor: DTensor) -> int:
    """Return the first row of this rank's shard.

    FSDP2 cuts the first dimension into equal chunks, the last ones shorter or empty.
    """
    mesh = tensor.device_mesh
    rows = tensor.shape[0]
    return min(rows, -(-rows // mesh.size()) * mesh.get_local_rank())


def _layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return a model's layers: the blocks that the library itself never splits over devices."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


# Digests of a training state and of its weights: equal for equal bits on every layout of ranks. All ranks take part.
# Each reads its own parts in place, once, and only two numbers per tensor are communicated.


def state_digest(named_tensors: Iterable[tuple[str, torch.Tensor]], weight_version: int, world_size: int) -> str:
    """Return SHA-256 over the version and every tensor's name, shape, dtype and fingerprint of its bits."""
    entries, fingerprints = [], []
    for name, tensor in named_tensors:
        local, offset = local_part(tensor)
        if world_size > 1 and not isinstance(tensor, DTensor) and dist.get_rank():
            local = local[:0]  # the first rank answers for what all have whole
        entries.append((name, tensor.shape, str(tensor.dtype)))
        fingerprints.append(fingerprint(local, offset))
    return digest(entries, _sum_over_ranks(fingerprints, world_size), f"weight_version {weight_version}")


Piece = tuple[str, torch.Size, torch.Tensor, int]
"""Name and shape of a whole tensor, this rank's part of the flattened tensor in float32, and the number of elements
before that part."""


def sharded_weights_checksum(pieces: Iterable[Piece], world_size: int) -> str:
    """Return `weights_checksum` of whole tensors. Every rank has one piece of each, in the same order."""
    entries, fingerprints = [], []
    for name, shape, values, offset in pieces:
        entries.append((name, shape, "float32"))
        fingerprints.append(fingerprint(values, offset))
    return digest(entries, _sum_over_ranks(fingerprints, world_size))


def _sum_over_ranks(fingerprints: list[torch.Tensor], world_size: int) -> torch.Tensor:
    sums = torch.stack([each.to(fingerprints[0].device) for each in fingerprints])  # some may be on the host
    if world_size > 1:
        dist.all_reduce(sums)
    return sums
