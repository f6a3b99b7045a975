"""Rotary embedding of packed sequences, beside Megatron's own, which rotates one sequence after another."""

from typing import Any

import pytest
import torch

from cairn.engines.training.megatron.backend import backend_for

LENGTHS = [8, 16, 8, 40, 24]


class Group:
    """As much of a context-parallel group as a rotary embedding asks for."""

    def __init__(self, ranks: int, own: int) -> None:
        self.size, self.rank = lambda: ranks, lambda: own


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"mla_rotary_interleaved": True, "mscale": 1.3}, {"rotary_interleaved": True}], ids=str
)
def test_sequences_are_rotated_together_as_megatron_rotates_each(ranks: int, options: dict[str, Any]) -> None:
    backend_for(torch.device("cpu"))
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding

    from cairn.engines.training.megatron.model import rotate_packed

    assert rope_utils._apply_rotary_pos_emb_thd is rotate_packed, "what Megatron calls"
    one_by_one = rotary_pos_embedding._apply_rotary_pos_emb_thd
    random = torch.Generator().manual_seed(0)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    angles = torch.rand(max(LENGTHS), 1, 1, 6, generator=random)
    for rank in range(ranks):
        tokens = torch.rand(sum(LENGTHS) // ranks, 3, 8, generator=random)
        arguments = tokens, ends, angles
        found = rotate_packed(*arguments, cp_group=Group(ranks, rank), **options)
        assert found.equal(one_by_one(*arguments, cp_group=Group(ranks, rank), **options))
