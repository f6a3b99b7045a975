"""The policy's loss and log-probs where each tensor-parallel rank has the logits of a part of the vocabulary."""

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
        entropies = None
        if is_policy_gradient(algorithm):
            entropies = entropy_of(logits, differentiable=algorithm.entropy_coef > 0)
        return loss_and_metrics(log_probs_of(logits, tokens.targets), entropies, tokens, algorithm)

    def read(self, outputs: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """[N] log-probs of the tokens."""
        return log_probs_of(self._logits(outputs, tokens), tokens.targets)

    def _logits(self, outputs: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        logits = hide_filling(outputs / self._temperature, self._vocabulary)
        first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        return within(logits, tokens.kept, first)


def hide_filling(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """[N, V / ranks] the logits with those beyond the model's vocabulary made impossible."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    width = logits.shape[-1]
    if width * ranks == vocabulary:
        return logits
    first = parallel_state.get_tensor_model_parallel_rank() * width
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
    if not differentiable:
        logits = logits.detach()
    highest = logits.detach().max(-1).values
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    shifted = logits - highest.unsqueeze(-1)
    normalizer = reduce_from_tensor_model_parallel_region(shifted.exp().sum(-1)).log()
    probabilities = (shifted - copy_to_tensor_model_parallel_region(normalizer).unsqueeze(-1)).exp()
    return normalizer - reduce_from_tensor_model_parallel_region((probabilities * shifted).sum(-1))
