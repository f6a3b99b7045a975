"""Whole weights by their Hugging Face names, from the ranks that hold their parts.

A replica of the model is spread over a group of ranks: TP × PP of them for dense weights, expert-TP × EP × PP of them
for experts. Each replica gathers its own weights, a bucket at a time: every owner sends one packed message.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from math import prod

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from cairn.engines.training.megatron.weights import Block, Ownership, Parameter, as_matrix
from cairn.engines.weights.buckets import Bucket
from cairn.engines.weights.packing import Packing, Whole, packings


class Receivers(Enum):
    """The ranks that get the buckets."""

    FIRST = auto()
    """Rank 0 gets all of them."""
    IN_TURN = auto()
    """Each rank gets some of them: as equal a share as possible."""
    ALL = auto()
    """Every rank gets all of them."""


@dataclass(frozen=True)
class Replica:
    """The ranks over which one copy of dense weights, or of experts, is spread."""

    expert: bool
    group: dist.ProcessGroup
    ownership: Ownership

    @classmethod
    def agree(cls, parameters: Sequence[Parameter]) -> "list[Replica]":
        """Return this rank's replicas: of the dense weights and, where the model has any, of the experts. All ranks
        take part."""
        groups = [(False, parallel_state.get_model_parallel_group())]
        if parallel_state.get_expert_tensor_model_pipeline_parallel_group(check_initialized=False) is not None:
            groups.append((True, parallel_state.get_expert_tensor_model_pipeline_parallel_group()))
        replicas = []
        for expert, group in groups:
            kind = [parameter for parameter in parameters if parameter.expert == expert]
            replicas.append(cls(expert, group, Ownership.agree(kind, group)))
        return [replica for replica in replicas if replica.ownership.owners]

    def packings(self, dtype: torch.dtype, bucket_bytes: int) -> list[Packing]:
        """Return the buckets, equal on all members."""
        weights = []
        for name, parts in self.ownership.tensors().items():
            held: dict[int, int] = {}
            for owner, block in parts:
                held[owner] = held.get(owner, 0) + block.height * block.width
            first = parts[0][1]
            weights.append(Whole(name, torch.float32 if first.exact else dtype, first.whole_shape, held))
        return packings(weights, bucket_bytes)


def gather(
    parameters: Sequence[Parameter],
    replicas: Sequence[Replica],
    dtype: torch.dtype,
    device: torch.device,
    content: Callable[[torch.Tensor], torch.Tensor],
    bucket_bytes: int,
    to: Receivers = Receivers.FIRST,
) -> Iterator[Bucket]:
    """Yield buckets of whole weights, each in one piece on the device; one is held at a time. All ranks must iterate to
    the end.

    Args:
        device: device on which parts are packed, exchanged and put together.
        content: returns the tensor to read for a parameter's value.
        to: the ranks that yield them.
    """
    everywhere, numbers, ranks = to is Receivers.ALL, count(), dist.get_world_size()
    for replica in replicas:
        local = {
            (block.name, block.row, block.column): block.of(matrix)
            for parameter in parameters
            if parameter.expert == replica.expert
            for matrix in (as_matrix(content(parameter.value.detach())),)
            for block in parameter.blocks
        }
        members = dist.get_process_group_ranks(replica.group)
        me, tensors = dist.get_rank(replica.group), replica.ownership.tensors()
        for packing in replica.packings(dtype, bucket_bytes):
            number = next(numbers)
            receiver = number % ranks if to is Receivers.IN_TURN else 0
            if not everywhere and receiver not in members:
                continue
            messages: dict[int, torch.Tensor] = {}
            for owner, length in packing.lengths.items():
                if everywhere or owner == me or members[me] == receiver:
                    messages[owner] = torch.empty(length, dtype=torch.uint8, device=device)
            if me in messages and me in packing.lengths:
                for weight, start in packing.places(me):
                    for block, values in _parts(messages[me], weight, start, tensors[weight.name], me):
                        values.copy_(local[weight.name, block.row, block.column])
            _exchange(messages, members, replica.group, None if everywhere else receiver)
            if everywhere or members[me] == receiver:
                yield _put_together(packing, messages, tensors, device)


def _exchange(
    messages: Mapping[int, torch.Tensor], members: Sequence[int], group: dist.ProcessGroup, receiver: int | None
) -> None:
    """Have one rank receive the owners' messages, or all members where `receiver` is None."""
    if receiver is None:
        if len(members) > 1:
            works = [dist.broadcast(one, members[owner], group, async_op=True) for owner, one in messages.items()]
            for work in works:
                work.wait()
        return
    for owner, message in messages.items():
        if members[owner] != dist.get_rank():
            dist.recv(message, members[owner], group)
        elif dist.get_rank() != receiver:
            dist.send(message, receiver, group)


def _put_together(
    packing: Packing,
    messages: Mapping[int, torch.Tensor],
    tensors: dict[str, list[tuple[int, Block]]],
    device: torch.device,
) -> Bucket:
    bucket = Bucket.empty([(one.name, one.dtype, one.shape) for one in packing.weights], device)
    for owner, message in messages.items():
        for weight, start in packing.places(owner):
            parts = tensors[weight.name]
            whole = bucket[weight.name].view(parts[0][1].rows, parts[0][1].columns)
            for block, values in _parts(message, weight, start, parts, owner):
                whole[block.row : block.row + block.height, block.column_slice] = values
    return bucket


def _parts(
    message: torch.Tensor, weight: Whole, start: int, parts: Sequence[tuple[int, Block]], owner: int
) -> Iterator[tuple[Block, torch.Tensor]]:
    """Yield an owner's blocks of a weight, and for each [height, width], a view of its place in the owner's message."""
    for holder, block in parts:
        if holder == owner:
            end = start + prod((block.height, block.width)) * weight.dtype.itemsize
            yield block, message[start:end].view(weight.dtype).view(block.height, block.width)
            start = end
