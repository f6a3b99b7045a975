"""Log-probs and entropies of the policy, from logits over a vocabulary that ranks may share.

The logits [N, V] are the largest tensor of a step: 32,768 tokens and 151,936 ids take 10 GB in bfloat16. So they exist
once. They are read a few rows at a time, and the backward pass overwrites them with their own gradient. Beside them
stand numbers for each row, and float32 copies of one chunk of rows.

| ranks exchange for each row | |
|---|---|
| once | the largest logit |
| once | Σ e^(x - largest), Σ e^(x - largest) (x - largest), and the logits of the requested ids |
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from cairn.engines.training.chunks import chunk_logits
from cairn.engines.training.log_probs import IMPOSSIBLE_LOGIT, LogitSupport, outside_support, top_rows


@dataclass(frozen=True)
class Part:
    """Part of the vocabulary whose logits this rank has."""

    first: int = 0
    """Token id of the first logit."""
    size: int | None = None
    """Number of token ids of the whole vocabulary; logits of higher ids are padding. None: no padding."""
    group: dist.ProcessGroup | None = None
    """Ranks that have the other parts; None where this rank has all."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def highest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the maximum over ranks."""
        if self.group is None:
            return values
        values = values.clone()
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def concatenated(self, values: torch.Tensor) -> torch.Tensor:
        """Return [N, ranks × columns], from [N, columns] of each rank."""
        if self.group is None:
            return values
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.cat(parts, -1)


WHOLE = Part()


@dataclass(frozen=True)
class Softmax:
    """The policy: softmax of logits / temperature over each token's sampling support."""

    temperature: float
    support: LogitSupport | None = None
    """Sampling support of the N tokens; None: the whole vocabulary."""
    rows: torch.Tensor | None = None
    """[N] int64, no row twice: the rows of the logits that predict the tokens. The other rows get a gradient of 0.
    None: there are N rows."""
    part: Part = WHOLE

    def chunks(self, logits: torch.Tensor) -> Iterator["_Chunk"]:
        """Yield all N rows in chunks of nearly equal size. So no row is alone, which some reductions would treat
        differently."""
        count = len(logits if self.rows is None else self.rows)
        width = logits.shape[-1]
        parts = max(1, min(count, -(-count * width // chunk_logits(on_gpu=logits.is_cuda))))
        bounds = [count * i // parts for i in range(parts + 1)]
        supports = [None] * parts if self.support is None else self.support.split(bounds)
        for start, stop, support in zip(bounds[:-1], bounds[1:], supports, strict=True):
            rows = None if self.rows is None else self.rows[start:stop]
            yield _Chunk(self, logits, start, stop, rows, support)


@dataclass(frozen=True)
class _Chunk:
    """R consecutive ones of the N rows."""

    softmax: Softmax
    logits: torch.Tensor
    start: int
    stop: int
    rows: torch.Tensor | None
    support: LogitSupport | None

    def read(self) -> torch.Tensor:
        """Return a copy of the [R, V] logits, at least in float32, as the softmax takes them."""
        dtype = torch.promote_types(self.logits.dtype, torch.float32)
        if self.rows is None:
            x = self.logits[self.start : self.stop].to(dtype, copy=True)
        else:
            x = self.logits.index_select(0, self.rows).to(dtype)
        if self.softmax.temperature != 1:
            x.div_(self.softmax.temperature)
        part = self.softmax.part
        if part.size is not None and part.first + x.shape[-1] > part.size:
            x[:, max(0, part.size - part.first) :] = IMPOSSIBLE_LOGIT
        if self.support is not None:
            x.masked_fill_(outside_support(self.support, x, part.first), IMPOSSIBLE_LOGIT)
        return x

    def write_gradient(self, gradient: torch.Tensor) -> None:
        """Overwrite the logits by the gradient of what `read` returned."""
        if self.support is not None:
            gradient.masked_fill_(outside_support(self.support, gradient, self.softmax.part.first), 0)
        if self.softmax.temperature != 1:
            gradient.div_(self.softmax.temperature)
        if self.rows is None:
            self.logits[self.start : self.stop].copy_(gradient)
        else:
            self.logits.index_copy_(0, self.rows, gradient.to(self.logits.dtype))

    def places(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [R, k] columns of this chunk's ids, and whether this rank lacks each of them."""
        places = ids[self.start : self.stop] - self.softmax.part.first
        width = self.logits.shape[-1]
        return places.clamp(0, width - 1), (places < 0) | (places >= width)


class Evaluated(NamedTuple):
    """Numbers of N tokens, the same on all ranks that share the vocabulary."""

    log_probs: torch.Tensor
    """[N] of the targets."""
    entropies: torch.Tensor | None
    """[N] of the next-token distributions, in nats; None where they are not requested."""
    at_ids: torch.Tensor
    """[N, k] log-probs of the other ids."""


def evaluate(
    logits: torch.Tensor,
    targets: torch.Tensor,
    softmax: Softmax,
    *,
    entropy: bool = False,
    ids: torch.Tensor | None = None,
) -> Evaluated:
    """Return log-probs and entropies, differentiable. The backward pass overwrites the logits by their gradient.

    So backward runs once, and nothing else may need the logits after it; autograd raises RuntimeError otherwise.

    Args:
        logits: [rows, V / ranks], in any format; the result is at least in float32.
        targets: [N] int64.
        entropy: whether to compute entropies.
        ids: [N, k] int64: further ids whose log-probs are returned.
    """
    targets = targets.unsqueeze(-1)
    columns = targets if ids is None else torch.cat([targets, ids], -1)
    log_probs, entropies = _Evaluate.apply(logits, columns, softmax, entropy)
    return Evaluated(log_probs[:, 0], entropies, log_probs[:, 1:])


def read_log_probs(logits: torch.Tensor, targets: torch.Tensor, softmax: Softmax, top_k: int = 0) -> torch.Tensor:
    """Return [N] log-probs of the targets.

    With `top_k`, return rows with the most probable tokens too (`cairn.engines.training.log_probs.top_rows`). These are
    the k largest among each rank's k largest, so they are the same on all ranks.
    """
    sums = _sums(logits, targets.unsqueeze(-1), softmax, entropy=False)
    log_probs = sums.log_probs.squeeze(-1)
    if not top_k:
        return log_probs
    part = softmax.part
    tops = [chunk.read().topk(min(top_k, logits.shape[-1])) for chunk in softmax.chunks(logits)]
    values = part.concatenated(torch.cat([top.values for top in tops]))
    ids = part.concatenated(torch.cat([top.indices for top in tops]) + part.first)
    top = values.topk(top_k)
    return top_rows(log_probs, top.values - sums.normalizer.unsqueeze(-1), ids.gather(-1, top.indices))


class _Sums(NamedTuple):
    normalizer: torch.Tensor
    """[N]: log-sum-exp of the logits."""
    log_probs: torch.Tensor
    """[N, k]."""
    entropies: torch.Tensor | None
    """[N]; None where they are not requested."""


@torch.no_grad()
def _sums(logits: torch.Tensor, ids: torch.Tensor, softmax: Softmax, *, entropy: bool) -> _Sums:
    """Return what one pass over the logits gives.

    With m the largest logit, Z = Σ e^(x - m) and W = Σ e^(x - m) (x - m), the log-sum-exp is log Z + m and the entropy
    log Z - W / Z. Both terms of the entropy are at least 0, so nothing cancels. A rank's Z and W, for its own largest
    logit m', become those for m by Z e^(m' - m) and (W + (m' - m) Z) e^(m' - m).

    Args:
        ids: [N, k] int64.
    """
    highest, totals, expected, picked = [], [], [], []
    for chunk in softmax.chunks(logits):
        x = chunk.read()
        places, elsewhere = chunk.places(ids)
        picked.append(x.gather(-1, places).masked_fill_(elsewhere, 0))
        highest.append(x.amax(-1))
        x.sub_(highest[-1].unsqueeze(-1))
        weights = x.exp() if entropy else x.exp_()
        totals.append(weights.sum(-1))
        expected.append(weights.mul_(x).sum(-1) if entropy else torch.zeros_like(totals[-1]))
    own, total, weighted, values = (torch.cat(parts) for parts in (highest, totals, expected, picked))
    part = softmax.part
    largest = part.highest(own)
    if part.group is not None:
        scale = (own - largest).exp()
        sums = torch.cat(
            [(scale * total)[:, None], (scale * (weighted + (own - largest) * total))[:, None], values], -1
        )
        part.sum(sums)
        total, weighted, values = sums[:, 0], sums[:, 1], sums[:, 2:]
    logs = total.log()
    normalizer = logs + largest
    entropies = logs - weighted / total if entropy else None
    return _Sums(normalizer, values - normalizer.unsqueeze(-1), entropies)


class _Evaluate(torch.autograd.Function):
    """([N, k] log-probs of ids, [N] entropies) from logits, which the backward pass overwrites by their gradient."""

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, ids: torch.Tensor, softmax: Softmax, entropy: bool) -> Any:
        sums = _sums(logits, ids, softmax, entropy=entropy)
        context.softmax = softmax
        context.set_materialize_grads(False)
        context.save_for_backward(logits, ids, sums.normalizer, sums.entropies)
        return sums.log_probs, sums.entropies

    @staticmethod
    @once_differentiable
    def backward(context: Any, of_log_probs: torch.Tensor | None, of_entropies: torch.Tensor | None) -> Any:
        """With p the softmax, g the gradients of the log-probs and h that of the entropy H, the gradient of logit j is

        Σ_i g_i [j = id_i] - p_j (Σ_i g_i + h (log p_j + H)).
        """
        logits, ids, normalizer, entropies = context.saved_tensors
        softmax: Softmax = context.softmax
        gradients = logits.detach()  # shares the version counter, so that autograd notices a second use
        if of_log_probs is None:
            of_log_probs = normalizer.new_zeros(ids.shape)
        if softmax.rows is not None:
            others = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            others[softmax.rows] = False
            gradients.masked_fill_(others.unsqueeze(-1), 0)
        totals = of_log_probs.sum(-1, keepdim=True)
        for chunk in softmax.chunks(gradients):
            here = slice(chunk.start, chunk.stop)
            x = chunk.read().sub_(normalizer[here].unsqueeze(-1))
            if of_entropies is None:
                x.exp_().mul_(-totals[here])
            else:
                probabilities = x.exp()
                x.add_(entropies[here].unsqueeze(-1)).mul_(-of_entropies[here].unsqueeze(-1)).sub_(totals[here])
                x.mul_(probabilities)
                del probabilities
            places, elsewhere = chunk.places(ids)
            x.scatter_add_(-1, places, of_log_probs[here].masked_fill(elsewhere, 0))
            chunk.write_gradient(x)
        return gradients, None, None, None
