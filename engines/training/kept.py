"""Log-probs within what tokens were drawn from, where the sampler had cut the vocabulary down (top-p, top-k).

The policy that sampled is then the softmax over the kept tokens alone: log π(a) = logit(a) - log Σ_{b kept} e^logit(b).
The set is recorded with the sample and no function of the weights that are trained, so over the sampler's own draws
E[∇ log π] = 0, as a policy gradient needs; with the whole vocabulary's log-probs it would not be.

Every log-prob is taken within the same set: the current and the old policy's, whose ratio is then 1 where the weights
are equal; the rollout engine's, which reports it so; and those of the reference and the teacher, since outside the set
nothing is sampled that could tell them apart from the policy, and a divergence from equal weights must be 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cairn.engines.types import KeptTokens

NEVER = -1e30
"""The logit of what cannot be drawn: finite, so that its product with a probability of 0 is 0."""


@dataclass(frozen=True)
class Kept:
    """What N tokens were drawn from, as places in their logits [N, V]; a token without a place was drawn from all."""

    rows: torch.Tensor
    """[M] int64, ascending: which of the N tokens."""
    ids: torch.Tensor
    """[M] int64: the token ids that it could have been."""

    @classmethod
    def of(cls, parts: Sequence[KeptTokens], device: torch.device) -> "Kept":
        """Of the tokens of several parts, one part after the other."""
        counts = np.concatenate([part.counts for part in parts])
        ids = np.concatenate([part.ids for part in parts]).astype(np.int64)
        rows = np.repeat(np.arange(len(counts)), counts)
        return cls(torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device))

    def at(self, order: torch.Tensor, size: int) -> "Kept":
        """Of some of `size` tokens, by their places among them, ascending."""
        place = torch.full((size,), -1, dtype=torch.int64, device=order.device)
        place[order] = torch.arange(len(order), device=order.device)
        rows = place[self.rows]
        there = rows >= 0
        return Kept(rows[there], self.ids[there])


def within(logits: torch.Tensor, kept: Kept | None, first: int = 0) -> torch.Tensor:
    """[N, V] logits with those of tokens that could not be drawn made impossible; they get no gradient.

    Args:
        kept: None leaves the logits as they are.
        first: the token id of the first logit, where each rank has a part of the vocabulary.
    """
    if kept is None:
        return logits
    outside = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    outside[kept.rows.unique_consecutive()] = True
    ids = kept.ids - first
    here = (ids >= 0) & (ids < logits.shape[-1])
    outside[kept.rows[here], ids[here]] = False
    return logits.masked_fill(outside, NEVER)
