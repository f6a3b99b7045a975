"""Fingerprints of a training state that Megatron has cut into pieces, equal on every layout of ranks: what each rank
reads of the Hugging Face tensors where it holds them adds up to `cairn.engines.weights.checksum.fingerprint` of the
whole."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from cairn.engines.training.megatron.weights import Block, Ownership
from cairn.engines.weights.checksum import fingerprint


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a parameter's flattened local value, or of a tensor of its shape, that count here."""

    kind: str
    values: torch.Tensor
    """[end - start]."""
    start: int
    blocks: list[Block]


Fingerprints = tuple[list[tuple[str, tuple[int, ...], str]], torch.Tensor]
"""Name, shape and dtype of n tensors, and their fingerprints [n, 2] int64."""


def sharded_fingerprints(
    pieces: Iterable[Piece],
    kinds: Mapping[str, Collection[str]],
    ownership: Ownership,
    dtype: str,
    device: torch.device,
) -> Fingerprints:
    """Of every whole tensor of every kind; all ranks take part.

    Args:
        kinds: prefixes of the tensors' names, such as "exp_avg.", and the names that each goes with; every piece is of
            one of them.
        dtype: that all tensors count as.
        device: over which ranks add up.
    """
    tensors = ownership.tensors()
    entries = [
        (f"{kind}{name}", parts[0][1].whole_shape, dtype)
        for kind, names in kinds.items()
        for name, parts in tensors.items()
        if name in names
    ]
    index = {name: place for place, (name, _, _) in enumerate(entries)}
    sums = torch.zeros(len(entries), 2, dtype=torch.int64, device=device)
    for piece in pieces:
        for name, values, offset in _runs(piece):
            sums[index[piece.kind + name]] += fingerprint(values, offset)
    dist.all_reduce(sums)
    return entries, sums


def _runs(piece: Piece) -> Iterator[tuple[str, torch.Tensor, int]]:
    """What a piece holds, as runs of consecutive elements of whole tensors: name, elements, place of the first.

    Blocks that follow each other in the whole tensor, as those of a query projection do, are one run."""
    run: list[torch.Tensor] = []
    name, first, end = "", 0, 0
    for block in sorted(piece.blocks, key=lambda block: (block.name, block.row, block.column)):
        values, offset = _part(piece, block)
        if run and (name, end) == (block.name, offset):
            run.append(values)
        else:
            if run:
                yield name, torch.cat(run), first
            run, name, first = [values], block.name, offset
        end = offset + len(values)
    if run:
        yield name, torch.cat(run), first


def _part(piece: Piece, block: Block) -> tuple[torch.Tensor, int]:
    """What a piece holds of a block, and its place in the whole tensor. Of a block that is narrower than the tensor it
    is whole rows, zero where other ranks hold them: zeros add nothing to a fingerprint."""
    width = block.height if block.transposed else block.width  # of the local parameter
    first = block.local_row * width
    start = max(piece.start, first)
    end = max(start, min(piece.start + len(piece.values), first + block.height * block.width))
    values = piece.values[start - piece.start : end - piece.start]
    if block.transposed:
        return _spread(values, start - first, block), block.row * block.columns
    row, column = divmod(start - first, block.width)
    if block.width == block.columns:
        return values, (block.row + row) * block.columns + column
    rows = functional.pad(values, (column, -(column + len(values)) % block.width)).view(-1, block.width)
    whole = functional.pad(rows, (block.column, block.columns - block.column - block.width))
    return whole.flatten(), (block.row + row) * block.columns


def _spread(values: torch.Tensor, start: int, block: Block) -> torch.Tensor:
    """Whole rows of the tensor, zero but for what these elements of a transposed block are of them.

    Args:
        start: elements of the block before them, as the local parameter has it.
    """
    size = block.height * block.width
    held = functional.pad(values, (start, size - start - len(values))).view(block.width, block.height)
    whole = values.new_zeros(block.height, block.columns)
    whole[:, block.columns_held] = held.T
    return whole.flatten()
