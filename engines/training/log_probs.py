"""Log-probabilities of chosen tokens, from logits computed only where they are needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from cairn.engines.types.types import KeptTokens

# Log-probs within what tokens were drawn from, where the sampler had cut the vocabulary down (top-p, top-k).
#
# The policy that sampled is then the softmax over the kept tokens alone: log π(a) = logit(a) - log Σ_{b kept}
# e^logit(b). The set is recorded with the sample and no function of the weights that are trained, so over the sampler's
# own draws E[∇ log π] = 0, as a policy gradient needs; with the whole vocabulary's log-probs it would not be.
#
# Every log-prob is taken within the same set: the current and the old policy's, whose ratio is then 1 where the weights
# are equal; the rollout engine's, which reports it so; and those of the reference and the teacher, since outside the
# set nothing is sampled that could tell them apart from the policy, and a divergence from equal weights must be 0.


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


# The k most probable tokens of a model at each response token, as a row of 1 + 2k float32.
#
# | column | |
# |---|---|
# | 0 | log-prob of the response token itself |
# | 1 … k | log-probs of the k most probable tokens, from the most probable on |
# | k + 1 … 2k | their ids, which float32 holds exactly below 2^24 |
#
# As one row they go the way of a single log-prob, through one all-reduce and in one array a sample. All log-probs are
# those of the softmax over the whole vocabulary, or over what the token was drawn from
# (`cairn.engines.training.log_probs`); where that is less than k tokens, the others have the id 0 and the log-prob
# `ABSENT`, whose probability is 0.


ABSENT = -1e30
"""The log-prob where there is no token: finite, so that its product with a probability of 0 is 0."""


def row_shape(k: int) -> tuple[int, ...]:
    """What there is of a token: a row, or where k is 0 one number, its log-prob."""
    return (1 + 2 * k,) if k else ()


def split_rows(rows: Sequence[np.ndarray], k: int, vocabulary: int) -> dict[str, list[np.ndarray]]:
    """Columns of a teacher's rows [R_i, 1 + 2k], by their names in a `TrainBatch`: [R_i], [R_i, k] float32 and
    [R_i, k] int32 of each sequence.

    Args:
        vocabulary: tokens that the tokenizer and the policy know. Models have other numbers of outputs; what is beyond
            is left out.
    """
    found: dict[str, list[np.ndarray]] = {"teacher_log_probs": [], "teacher_top_log_probs": [], "teacher_top_ids": []}
    for given in rows:
        table = given.reshape(-1, *row_shape(k))
        ids = table[:, k + 1 :].astype(np.int32)
        unknown = ids >= vocabulary
        found["teacher_log_probs"].append(table[:, 0])
        found["teacher_top_log_probs"].append(np.where(unknown, np.float32(ABSENT), table[:, 1 : k + 1]))
        found["teacher_top_ids"].append(np.where(unknown, 0, ids).astype(np.int32))
    return found


_ENTROPY_CHUNK = 1 << 20  # logits whose softmax is held at a time: 4 MiB


def response_logits(
    model: PreTrainedModel, input_ids: torch.Tensor, positions: torch.Tensor, **beside: Any
) -> torch.Tensor:
    """[N, V] logits at N positions of a right-padded batch, in the model's number format.

    Only these positions pass through the output layer. They are picked at its input, inside the model's own forward
    pass, so that whatever the model does after it (scaling, soft-capping) is kept, and FSDP's hooks run. Padding on the
    right needs no attention mask: a causal model never looks at it from the positions before.

    Args:
        input_ids: [B, L] int64.
        positions: [N] int64 into the flattened [B * L].
        beside: what else the model's forward pass is given.
    """

    def pick(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0].flatten(0, 1).index_select(0, positions).unsqueeze(0),)

    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(pick)
    try:
        logits: torch.Tensor = model(input_ids=input_ids, use_cache=False, **beside).logits
    finally:
        hook.remove()
    return logits.squeeze(0)


def token_log_probs(logits: torch.Tensor, normalizer: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[N] log-probability of each target: its logit minus the normalizer; a softmax over [N, V] is never kept.

    Args:
        logits: [N, V] float32.
        normalizer: [N], the logits' log-sum-exp.
        targets: [N] int64.
    """
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer


def top_rows(log_probs: torch.Tensor, top_log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[N, 1 + 2k] float32, as `cairn.engines.training.log_probs` has it: of the log-probs [N] of tokens, and of the
    most probable ones, [N, k], with their ids, [N, k]."""
    absent = top_log_probs < ABSENT / 2
    top_log_probs, ids = top_log_probs.masked_fill(absent, ABSENT), ids.masked_fill(absent, 0)
    return torch.cat([log_probs.unsqueeze(-1), top_log_probs, ids.float()], -1)


def entropy(logits: torch.Tensor, normalizer: torch.Tensor, *, differentiable: bool) -> torch.Tensor:
    """[N] entropy of the next-token distribution, in nats.

    Large logits cancel before anything is added up: with s = logit - normalizer, whose constant may be off by a
    rounding error, and Z = Σ exp(s), close to 1, it is log Z - Σ exp(s) s / Z.

    Where no gradient is wanted it is computed a few rows at a time: a mere metric takes little memory, and on a CPU
    only half the time when the rows fit its cache.

    Args:
        logits: [N, V] float32.
        normalizer: [N], the logits' log-sum-exp.
    """
    if differentiable:
        return _entropy(logits, normalizer)
    rows = max(1, _ENTROPY_CHUNK // logits.shape[-1])
    chunks = zip(logits.detach().split(rows), normalizer.detach().split(rows), strict=True)
    return torch.cat([_entropy(*chunk) for chunk in chunks])


def _entropy(logits: torch.Tensor, normalizer: torch.Tensor) -> torch.Tensor:
    shifted = logits - normalizer.detach().unsqueeze(-1)
    weights = shifted.exp()
    total = weights.sum(-1)
    return total.log() - (weights * shifted).sum(-1) / total
