"""Fingerprints of a training state that Megatron has cut into pieces, equal on every layout of ranks: what each rank
reads of the Hugging Face tensors where it holds them adds up to `engines.weights.checksum.fingerprint` of the whole."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engines.training.megatron.weights import Block, Ownership
from engines.weights.checksum import digest, fingerprint


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a parameter's flattened local value, or of a tensor of its shape, that count here."""

    kind: str
    values: torch.Tensor
    """[end - start]."""
    start: int
    blocks: list[Block]


def sharded_digest(pieces: Iterable[Piece], kinds: Iterable[str], ownership: Ownership, dtype: str, *extra: str) -> str:
    """SHA-256 over every tensor's name, shape, dtype and fingerprint; all ranks take part.

    Args:
        kinds: prefixes of the tensors' names, such as "exp_avg."; every piece is of one of them.
        dtype: that all tensors count as.
    """
    tensors = ownership.tensors()
    entries = [
        (f"{kind}{name}", ownership.shape(parts[0][1]), dtype) for kind in kinds for name, parts in tensors.items()
    ]
    index = {name: place for place, (name, _, _) in enumerate(entries)}
    sums: torch.Tensor | None = None
    for piece in pieces:
        if sums is None:
            sums = torch.zeros(len(entries), 2, dtype=torch.int64, device=piece.values.device)
        for block in piece.blocks:
            for part, offset in _runs(piece, block):
                sums[index[piece.kind + block.name]] += fingerprint(part, offset)
    if sums is None:
        sums = torch.zeros(len(entries), 2, dtype=torch.int64)
    dist.all_reduce(sums)
    return digest(entries, sums, *extra)


def _runs(piece: Piece, block: Block) -> Iterator[tuple[torch.Tensor, int]]:
    """What a piece holds of a block, as runs of consecutive elements of the whole tensor with the first one's place."""
    first = block.local_row * block.width
    start, end = max(piece.start, first), min(piece.start + len(piece.values), first + block.height * block.width)
    step = end - start if block.width == block.columns else block.width
    while start < end:
        row, column = divmod(start - first, block.width)
        stop = min(end, start + max(1, step) - (column if step == block.width else 0))
        yield (
            piece.values[start - piece.start : stop - piece.start],
            (block.row + row) * block.columns + block.column + column,
        )
        start = stop
