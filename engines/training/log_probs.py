"""Log-probabilities of chosen tokens, from logits computed only where they are needed."""

from typing import Any

import torch
from transformers import PreTrainedModel

from cairn.engines.training.top_k import ABSENT

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
    """[N, 1 + 2k] float32, as `cairn.engines.training.top_k` has it: of the log-probs [N] of tokens, and of the most
    probable ones, [N, k], with their ids, [N, k]."""
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
