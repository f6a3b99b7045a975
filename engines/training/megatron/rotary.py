"""Rotary embedding of packed sequences in one step, where no fused kernel does it.

0.19.2, models.common.embeddings.rope_utils, rotates one sequence after another, queries and keys of every layer. The
values are the same.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils


def rotate_packed(
    tokens: torch.Tensor, ends: torch.Tensor, angles: torch.Tensor, *, cp_group: Any, **options: Any
) -> torch.Tensor:
    """Return [T, heads, width] from the same shape, with T this context-parallel rank's tokens of all sequences.

    Args:
        ends: [B + 1] boundaries of the whole sequences. A rank holds two halves of equal length of each.
        angles: [longest, 1, 1, rotated width] of every position.
        options: those of Megatron's function for tokens with an angle each.
    """
    size, rank = cp_group.size(), cp_group.rank()
    ends = (ends // size).long()
    starts, lengths = ends[:-1], ends.diff()
    sequences = torch.repeat_interleave(
        torch.arange(len(lengths), device=ends.device), lengths, output_size=len(tokens)
    )
    positions = torch.arange(len(tokens), device=ends.device) - starts[sequences]
    if size > 1:
        half = (lengths // 2)[sequences]
        later = positions >= half
        positions = positions + half * torch.where(later, 2 * size - 2 - rank, rank)
    rotated = rope_utils._apply_rotary_pos_emb_bshd(tokens.unsqueeze(1), angles[positions], **options)
    return rotated.squeeze(1)
