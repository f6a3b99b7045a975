"""Packing of a micro-batch's samples into one sequence, cut over the ranks of a context-parallel group.

The engines cut it differently. Megatron pads every sample to a multiple of its alignment and cuts each into twice as
many chunks as there are ranks, of which rank r holds chunks r and 2n - 1 - r (`context_order`). Causal attention then
costs all ranks the same, and Transformer Engine's attention expects it. On the torch engine a rank holds consecutive
tokens of the whole sequence (`consecutive_order`), since its ranks divide attention by heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cairn.engines.models.routing import FREE
from cairn.engines.training.collate import LOSS_FIELDS, Tokens
from cairn.engines.types.types import TrainBatch


@dataclass(frozen=True)
class Packed:
    """This rank's part of a micro-batch of B samples: T tokens."""

    input_ids: torch.Tensor
    """[1, T] int64."""
    position_ids: torch.Tensor
    """[1, T] int64: position of each token in its sample."""
    ends: torch.Tensor
    """[B + 1] int32: boundaries of the padded samples in the whole micro-batch, from 0."""
    longest: int
    """Tokens of the longest padded sample."""
    tokens: Tokens
    """Chosen response tokens that this rank predicts; their `positions` index its own T tokens."""
    order: torch.Tensor
    """[N] int64: index of each of these tokens among the chosen tokens of the whole micro-batch."""
    real: torch.Tensor
    """[T] bool: which tokens are not padding."""
    routed: torch.Tensor | None = None
    """[T, layers, top-k]: the experts to use for each token, none for padding; None where no token has any."""


def padded_length(length: int, alignment: int) -> int:
    """Return the length of a sample padded to a multiple of `alignment`, in tokens."""
    return -(-length // alignment) * alignment


def context_order(lengths: Sequence[int], size: int, rank: int) -> torch.Tensor:
    """Return [T, 2] int64: sample and position of every token that a rank holds, in its order.

    Args:
        lengths: lengths of the padded samples; each divisible by 2 * `size` where there are several ranks.
        size: number of ranks of the context-parallel group.
    """
    parts = []
    for sample, length in enumerate(lengths):
        chunk = length // (2 * size)
        if size == 1:
            positions = torch.arange(length)
        else:
            first, second = rank * chunk, (2 * size - 1 - rank) * chunk
            positions = torch.cat([torch.arange(first, first + chunk), torch.arange(second, second + chunk)])
        parts.append(torch.stack([torch.full_like(positions, sample), positions], 1))
    return torch.cat(parts)


def as_rows(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return [sequences, longest, …]: packed tokens at their (sequence, position) `places`, and zeros after them.

    Causal attention never attends to these zeros from an earlier position.
    """
    count, longest = (places.max(0).values + 1).tolist()
    rows = tokens.new_zeros(count, longest, *tokens.shape[1:])
    return rows.index_put((places[:, 0], places[:, 1]), tokens)


def consecutive_order(lengths: Sequence[int], size: int, rank: int) -> torch.Tensor:
    """Return [T, 2] int64 as `context_order` does, for a rank that holds consecutive tokens of the packed samples.

    Args:
        lengths: lengths of the samples, in total divisible by `size`.
        size: number of ranks of the context-parallel group.
    """
    return context_order(lengths, 1, 0).chunk(size)[rank]


def pack(
    batch: TrainBatch,
    samples: Sequence[int],
    tokens: Tokens,
    *,
    lengths: Sequence[int],
    places: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> Packed:
    """Pack the samples of `tokens`. Return the part that this rank holds.

    Args:
        tokens: chosen tokens of these samples (see `cairn.engines.training.collate`), of all ranks.
        lengths: length of every sample, with the padding at its end.
        places: [T, 2] int64, sample and position of the tokens that this rank holds, on the CPU.
        group: the ranks that hold parts of the samples, over which a loss must sum; None where this rank holds all.
    """
    rows = [batch.input_ids[sample] for sample in samples]
    device = tokens.input_ids.device
    places = places.to(device)
    width = tokens.input_ids.shape[1]
    padded = torch.nn.functional.pad(tokens.input_ids, (0, max(lengths) - width))
    # Index among this rank's own tokens of the token at (sample, position), or -1.
    index = torch.full((len(rows), max(lengths)), -1, dtype=torch.int64, device=device)
    index[places[:, 0], places[:, 1]] = torch.arange(len(places), device=device)
    predicted = index[tokens.positions // width, tokens.positions % width]
    order = torch.nonzero(predicted >= 0).squeeze(1)
    return Packed(
        input_ids=padded[places[:, 0], places[:, 1]].unsqueeze(0),
        position_ids=places[:, 1].unsqueeze(0),
        ends=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device),
        longest=max(lengths),
        tokens=_chosen(tokens, order, predicted[order], group),
        order=order,
        real=places[:, 1] < torch.tensor([len(row) for row in rows], device=device)[places[:, 0]],
        routed=_routed(tokens.routed_experts, places, max(lengths) - width),
    )


def _routed(experts: torch.Tensor | None, places: torch.Tensor, padding: int) -> torch.Tensor | None:
    """Return the experts at (sample, position) `places`, from [B, L, layers, top-k]."""
    if experts is None:
        return None
    padded = torch.nn.functional.pad(experts, (0, 0, 0, 0, 0, padding), value=FREE)
    return padded[places[:, 0], places[:, 1]]


def _chosen(tokens: Tokens, order: torch.Tensor, positions: torch.Tensor, group: dist.ProcessGroup | None) -> Tokens:
    names = ("value_weights", "teacher_top_ids", *LOSS_FIELDS)
    loss_fields: dict[str, Any] = {
        name: None if (values := getattr(tokens, name)) is None else values[order] for name in names
    }
    return replace(
        tokens,
        positions=positions,
        targets=tokens.targets[order],
        weights=tokens.weights[order],
        shares=tokens.shares[order],
        samples=tokens.samples[order],
        over_ranks=None if group is None else partial(_SumOverRanks.apply, group),
        **loss_fields,
        kept=None if tokens.kept is None else tokens.kept.at(order, len(tokens.targets)),
    )


class _SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over the ranks of a group.

    The loss is the sum of the ranks' shares. Each share may depend on every rank's tensor through this sum, so the
    gradient is the sum of the ranks' gradients.
    """

    @staticmethod
    def forward(context: Any, group: dist.ProcessGroup, values: torch.Tensor) -> torch.Tensor:
        context.group = group
        return _summed(values, group)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return None, _summed(gradients[0], context.group)


def _summed(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = values.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
