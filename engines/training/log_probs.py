"""Log-probabilities and entropies of chosen tokens, from logits computed only where they are needed."""

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


def mask_outside_support(logits: torch.Tensor, support: LogitSupport | None, first: int = 0) -> torch.Tensor:
    """Return [N, V] logits in which tokens outside the support are impossible; these get no gradient.

    Args:
        support: sampling support; None leaves the logits unchanged.
        first: token id of the first logit, where each rank has a part of the vocabulary.
    """
    if support is None:
        return logits
    outside = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    outside[support.rows.unique_consecutive()] = True
    ids = support.ids - first
    here = (ids >= 0) & (ids < logits.shape[-1])
    outside[support.rows[here], ids[here]] = False
    return logits.masked_fill(outside, IMPOSSIBLE_LOGIT)


_ENTROPY_CHUNK = 1 << 20  # logits whose softmax is held at a time: 4 MiB


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


def token_log_probs(logits: torch.Tensor, normalizer: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return [N] log-probabilities of the targets: logit minus normalizer. A softmax over [N, V] is never stored.

    Args:
        logits: [N, V] float32.
        normalizer: [N], the logits' log-sum-exp.
        targets: [N] int64.
    """
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer


def policy_log_probs(
    logits: torch.Tensor, targets: torch.Tensor, support: LogitSupport | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the policy's [N, V] float32 logits, their [N] log-sum-exp, and the [N] log-probs of the targets.

    The policy is the softmax of logits / temperature over the sampling support.

    Args:
        logits: [N, V].
        targets: [N] int64.
    """
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    logits = mask_outside_support(logits, support)
    normalizer = logits.logsumexp(-1)
    return logits, normalizer, token_log_probs(logits, normalizer, targets)


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


def entropy(logits: torch.Tensor, normalizer: torch.Tensor, *, differentiable: bool) -> torch.Tensor:
    """Return [N] entropies of the next-token distributions, in nats.

    Large logits cancel before anything is added up: with s = logit - normalizer, whose constant may be off by a
    rounding error, and Z = Σ exp(s), close to 1, the entropy is log Z - Σ exp(s) s / Z.

    Where no gradient is needed, a few rows are computed at a time. A mere metric then takes little memory, and on a CPU
    only half the time if the rows fit its cache.

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
