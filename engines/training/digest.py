"""Digests of a training state and of its weights: equal for equal bits on every layout of ranks.

All ranks take part; each reads its own parts where they are, once, and only two numbers a tensor travel.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cairn.engines.training.sharding import local_part
from cairn.engines.weights.checksum import digest, fingerprint


def state_digest(named_tensors: Iterable[tuple[str, torch.Tensor]], weight_version: int, world_size: int) -> str:
    """SHA-256 over the version and every tensor's name, shape, dtype and fingerprint of its bits."""
    entries, fingerprints = [], []
    for name, tensor in named_tensors:
        local, offset = local_part(tensor)
        if world_size > 1 and not isinstance(tensor, DTensor) and dist.get_rank():
            local = local[:0]  # the first rank answers for what all have whole
        entries.append((name, tensor.shape, str(tensor.dtype)))
        fingerprints.append(fingerprint(local, offset))
    return digest(entries, _sum_over_ranks(fingerprints, world_size), f"weight_version {weight_version}")


Piece = tuple[str, torch.Size, torch.Tensor, int]
"""Name and shape of a whole tensor, this rank's part of it when it is flattened, float32, and how many elements come
before that."""


def sharded_weights_checksum(pieces: Iterable[Piece], world_size: int) -> str:
    """`weights_checksum` of whole tensors, of each of which every rank has one piece, in the same order."""
    entries, fingerprints = [], []
    for name, shape, values, offset in pieces:
        entries.append((name, shape, "float32"))
        fingerprints.append(fingerprint(values, offset))
    return digest(entries, _sum_over_ranks(fingerprints, world_size))


def _sum_over_ranks(fingerprints: list[torch.Tensor], world_size: int) -> torch.Tensor:
    sums = torch.stack(fingerprints)
    if world_size > 1:
        dist.all_reduce(sums)
    return sums
