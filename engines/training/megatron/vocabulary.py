"""The policy's loss and log-probs where each tensor-parallel rank has the logits of a part of the vocabulary."""

from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens
from cairn.engines.training.kept import NEVER, within
from cairn.engines.training.log_probs import top_rows
from cairn.engines.training.losses.objective import Metrics, loss_and_metrics
from cairn.engines.training.needs import is_policy_gradient


class Policy:
    """What the output layer's values mean: logits, divided by the rollout's temperature, of the tokens that the model
    knows and of filling; those that a token was not drawn from do not count."""

    def __init__(self, vocabulary: int, temperature: float) -> None:
        self._vocabulary, self._temperature = vocabulary, temperature

    def objective(
        self, outputs: torch.Tensor, tokens: Tokens, algorithm: AlgorithmConfig
    ) -> tuple[torch.Tensor, Metrics]:
        """As `cairn.engines.training.losses.objective.objective`."""
        logits = self._logits(outputs, tokens)
        if tokens.teacher_top_ids is not None:
            tokens = replace(tokens, top_log_probs=log_probs_at(logits, tokens.teacher_top_ids))
        entropies = None
        if is_policy_gradient(algorithm):
            entropies = entropy_of(logits, differentiable=algorithm.entropy_coef > 0)
        return loss_and_metrics(log_probs_of(logits, tokens.targets), entropies, tokens, algorithm)

    def read(self, outputs: torch.Tensor, tokens: Tokens, top_k: int = 0) -> torch.Tensor:
        """[N] log-probs of the tokens; with `top_k`, rows with the most probable tokens too
        (`cairn.engines.training.top_k`)."""
        logits = self._logits(outputs, tokens)
        log_probs = log_probs_of(logits, tokens.targets)
        return top_rows(log_probs, *most_probable(logits, top_k)) if top_k else log_probs

    def _logits(self, outputs: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        logits = hide_filling(outputs / self._temperature, self._vocabulary)
        return within(logits, tokens.kept, _first_token(logits))


def hide_filling(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """[N, V / ranks] the logits with those beyond the model's vocabulary made impossible."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    width = logits.shape[-1]
    if width * ranks == vocabulary:
        return logits
    first = _first_token(logits)
    filling = torch.arange(first, first + width, device=logits.device) >= vocabulary
    return logits.masked_fill(filling, NEVER)


def log_probs_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[N] log-probability of each target, the same on all tensor-parallel ranks.

    Megatron's unfused cross-entropy: the fused one rounds its gradient to bfloat16. It overwrites its input.

    Args:
        logits: [N, V / ranks] float32.
        targets: [N] int64.
    """
    return -vocab_parallel_cross_entropy(logits.clone(), targets)


def entropy_of(logits: torch.Tensor, *, differentiable: bool) -> torch.Tensor:
    """[N] entropy of the next-token distribution, in nats: log-sum-exp of the logits minus the expected logit.

    Args:
        logits: [N, V / ranks] float32.
    """
    shifted, normalizer = _normalized(logits if differentiable else logits.detach())
    probabilities = (shifted - copy_to_tensor_model_parallel_region(normalizer).unsqueeze(-1)).exp()
    return normalizer - reduce_from_tensor_model_parallel_region((probabilities * shifted).sum(-1))


def log_probs_at(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[N, k] log-probabilities of several tokens at each place, the same on all tensor-parallel ranks.

    Args:
        logits: [N, V / ranks] float32.
        ids: [N, k] int64.
    """
    shifted, normalizer = _normalized(logits)
    width = logits.shape[-1]
    places = ids - _first_token(logits)
    elsewhere = (places < 0) | (places >= width)
    own = shifted.gather(-1, places.clamp(0, width - 1)).masked_fill(elsewhere, 0)
    return reduce_from_tensor_model_parallel_region(own) - normalizer.unsqueeze(-1)


@torch.no_grad()
def most_probable(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, k] log-probabilities and [N, k] int64 ids of the k most probable tokens, from the most probable on, the same
    on all tensor-parallel ranks: the k largest of each rank's k largest.

    Args:
        logits: [N, V / ranks] float32.
    """
    shifted, normalizer = _normalized(logits)
    own = shifted.topk(min(k, logits.shape[-1]))
    values, ids = _all_ranks(own.values), _all_ranks(own.indices + _first_token(logits))
    top = values.topk(k)
    return top.values - normalizer.unsqueeze(-1), ids.gather(-1, top.indices)


def _normalized(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, V / ranks] the logits less the largest of their place, and [N] the log-sum-exp of these over all ranks."""
    highest = logits.detach().max(-1).values
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    shifted = logits - highest.unsqueeze(-1)
    return shifted, reduce_from_tensor_model_parallel_region(shifted.exp().sum(-1)).log()


def _first_token(logits: torch.Tensor) -> int:
    """The id of this rank's first logit."""
    return int(parallel_state.get_tensor_model_parallel_rank()) * logits.shape[-1]


def _all_ranks(values: torch.Tensor) -> torch.Tensor:
    """[N, ranks × columns] of [N, columns] on each tensor-parallel rank."""
    parts = [torch.empty_like(values) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    dist.all_gather(parts, values.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)
