"""Logits of chosen tokens, computed only where they are needed, and the tokens that could be sampled there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from cairn.engines.training.top_k import ABSENT
from cairn.engines.types.types import SamplingSupport

IMPOSSIBLE_LOGIT = -1e30
"""Logit of a token that cannot be sampled: finite, so that its product with a probability of 0 is 0."""


@dataclass(frozen=True)
class LogitSupport:
    """Sampling support of N tokens, as entries of their logits [N, V]; a token without entries was sampled from all.

    The sampler may cut the vocabulary down (top-p, top-k). The policy that sampled is then the softmax over the support
    alone: log π(a) = logit(a) - log Σ_{b in support} e^logit(b). The support is recorded with the sample and does not
    depend on the trained weights. Over the sampler's own draws E[∇ log π] = 0 holds, as a policy gradient needs; with
    log-probs over the whole vocabulary it would not.

    Every log-prob is taken over the same support. This holds for the current and the old policy, so that their ratio is
    1 where the weights are equal, and for the rollout engine, which reports such log-probs. It also holds for the
    reference and the teacher: nothing outside the support is sampled that could distinguish them from the policy, and a
    divergence between equal weights must be 0.
    """

    rows: torch.Tensor
    """[M] int64, ascending: the token of each entry, as an index into the N tokens."""
    ids: torch.Tensor
    """[M] int64: the id of a token in the support."""

    @classmethod
    def of(cls, parts: Sequence[SamplingSupport], device: torch.device) -> "LogitSupport":
        """Return the support of the tokens of several parts, one part after the other."""
        counts = np.concatenate([part.counts for part in parts])
        ids = np.concatenate([part.ids for part in parts]).astype(np.int64)
        rows = np.repeat(np.arange(len(counts)), counts)
        return cls(torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device))

    def at(self, order: torch.Tensor, size: int) -> "LogitSupport":
        """Return the support of some of `size` tokens, selected by their ascending indices."""
        place = torch.full((size,), -1, dtype=torch.int64, device=order.device)
        place[order] = torch.arange(len(order), device=order.device)
        rows = place[self.rows]
        there = rows >= 0
        return LogitSupport(rows[there], self.ids[there])

    def split(self, bounds: Sequence[int]) -> list["LogitSupport"]:
        """Return the support of each run of tokens, from one of the ascending bounds to the next."""
        places = torch.searchsorted(self.rows, torch.tensor(bounds, device=self.rows.device)).tolist()
        return [
            LogitSupport(self.rows[begin:end] - first, self.ids[begin:end])
            for first, begin, end in zip(bounds[:-1], places[:-1], places[1:], strict=True)
        ]


def outside_support(support: LogitSupport, logits: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return [N, V] bool: which logits belong to tokens outside the support.

    Args:
        logits: [N, V].
        first: token id of the first logit, where each rank has a part of the vocabulary.
    """
    outside = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    outside[support.rows.unique_consecutive()] = True
    ids = support.ids - first
    here = (ids >= 0) & (ids < logits.shape[-1])
    outside[support.rows[here], ids[here]] = False
    return outside


def response_logits(
    model: PreTrainedModel, input_ids: torch.Tensor, positions: torch.Tensor, **inputs: Any
) -> torch.Tensor:
    """Return [N, V] logits at N positions of a right-padded batch, in the model's number format.

    Only these positions pass through the output layer. They are selected at its input, inside the model's own forward
    pass. So everything that the model does after it (scaling, soft-capping) still happens, and FSDP's hooks run.
    Right padding needs no attention mask: a causal model does not attend to it from earlier positions.

    Args:
        input_ids: [B, L] int64.
        positions: [N] int64 into the flattened [B * L].
        inputs: further arguments of the model's forward pass.
    """

    def pick(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0].flatten(0, 1).index_select(0, positions).unsqueeze(0),)

    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(pick)
    try:
        logits: torch.Tensor = model(input_ids=input_ids, use_cache=False, **inputs).logits
    finally:
        hook.remove()
    return logits.squeeze(0)


def top_rows(log_probs: torch.Tensor, top_log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return [N, 1 + 2k] float32: for each response token its own log-prob and a model's k most probable tokens.

    | column | |
    |---|---|
    | 0 | log-prob of the response token itself |
    | 1 … k | log-probs of the k most probable tokens, from the most probable on |
    | k + 1 … 2k | their ids, which float32 holds exactly below 2^24 |

    One row is handled like a single log-prob: one all-reduce and one array per sample. All log-probs are those of the
    softmax over the whole vocabulary, or over the token's sampling support (`LogitSupport`). Where the support has less
    than k tokens, the remaining entries have the id 0 and the log-prob `ABSENT`, whose probability is 0.

    Args:
        log_probs: [N] of the response tokens.
        top_log_probs: [N, k] of the most probable tokens.
        ids: [N, k] of the most probable tokens.
    """
    absent = top_log_probs < ABSENT / 2
    top_log_probs, ids = top_log_probs.masked_fill(absent, ABSENT), ids.masked_fill(absent, 0)
    return torch.cat([log_probs.unsqueeze(-1), top_log_probs, ids.float()], -1)
