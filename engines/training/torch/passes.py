"""Passes of micro-batches through a model: with gradients to train, without to score."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from cairn.engines.models.published import biases_of, rebalanced
from cairn.engines.models.routing import RouteReplay, chosen_experts, mixtures
from cairn.engines.training.aggregations import NO_WEIGHT, Weight
from cairn.engines.training.batching import MicroBatch
from cairn.engines.training.collate import MISMATCH, Tokens, collate_responses, collate_trained, routed_choices
from cairn.engines.training.log_probs import response_logits
from cairn.engines.training.protocol import merge, numbers
from cairn.engines.training.vocabulary import Softmax, read_log_probs
from cairn.engines.types.types import TrainBatch


class Balance:
    """Load-balancing biases of a trained model's experts (`cairn.engines.models.published`).

    Counts the tokens of each expert over an optimizer step, and updates the biases from the counts.
    """

    def __init__(self, model: torch.nn.Module, rate: float) -> None:
        self._rate = rate
        self._real: torch.Tensor | None = None
        self._model = model
        self._counts: list[torch.Tensor] = []
        for block in mixtures(model).values():
            for _, bias in biases_of(block):
                see = partial(self._see, len(self._counts))
                block.experts.register_forward_pre_hook(see, with_kwargs=True)
                self._counts.append(torch.zeros_like(bias, dtype=torch.int64))

    @contextmanager
    def counting(self, real: torch.Tensor | None) -> Iterator[None]:
        """Count tokens within the context, which encloses a micro-batch's first pass.

        Args:
            real: [T] bool, which of its tokens count; None: none do.
        """
        self._real = real
        try:
            yield
        finally:
            self._real = None

    def forget(self) -> None:
        """Reset the counts."""
        self._counts = [torch.zeros_like(count) for count in self._counts]

    @torch.no_grad()
    def update(self, world_size: int) -> None:
        """Update the biases from the counts of all ranks."""
        # Looked up again: buffers that were moved to the host and back are other objects than before.
        for (_, bias), count in zip(biases_of(self._model), self._counts, strict=True):
            if world_size > 1:
                dist.all_reduce(count)
            bias.copy_(rebalanced(bias, count, self._rate))

    def _see(self, layer: int, experts: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._real is not None:
            chosen = chosen_experts(args, kwargs)[self._real].flatten()
            self._counts[layer] += torch.bincount(chosen, minlength=len(self._counts[layer]))


Objective = Callable[[torch.Tensor, Tokens], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(outputs of the output layer at the trained tokens, the tokens) → this micro-batch's share of the loss and of every
metric."""

Reading = Callable[[torch.Tensor, Tokens], torch.Tensor]
"""(outputs of the output layer at the chosen tokens, the tokens) → [N] float32, or [N, columns] for several numbers per
token."""


def read_policy(logits: torch.Tensor, tokens: Tokens, temperature: float, top_k: int = 0) -> torch.Tensor:
    """Return the same as `cairn.engines.training.vocabulary.read_log_probs`."""
    return read_log_probs(logits, tokens.targets, Softmax(temperature, tokens.kept), top_k)


def read_values(outputs: torch.Tensor, _: Tokens) -> torch.Tensor:
    """Return [N] values of a critic."""
    return outputs.float().squeeze(-1)


def accumulate_gradients(
    model: PreTrainedModel,
    batch: TrainBatch,
    micro_batches: Iterable[MicroBatch],
    weights: dict[int, Weight],
    objective: Objective,
    replay: RouteReplay | None = None,
    balance: Balance | None = None,
) -> dict[str, float]:
    """Add this rank's share of the loss's gradient to the parameters' gradients. Return its share of every metric.

    Args:
        weights: weights of each sample's trained tokens in the loss of the optimizer step.
        replay: makes the model use the experts that the rollout chose, where the batch has them.
        balance: counts the tokens of each expert.
    """
    collected = []
    routed = routed_choices(batch, weights)
    for micro_batch in micro_batches:
        token_weights = [weights[i] if micro_batch.counted else NO_WEIGHT for i in micro_batch.samples]
        tokens = collate_trained(batch, micro_batch.samples, token_weights, model.device)
        with replayed_routes(replay, tokens):
            with nullcontext() if balance is None else balance.counting(_counted(batch, micro_batch, tokens)):
                logits = _logits(model, batch, micro_batch, tokens)
            loss, metrics = objective(logits, tokens)
            loss.backward()
        if replay is not None and routed:
            metrics[MISMATCH] = replay.differing() * micro_batch.counted / routed
        collected.append(metrics)
    return merge(map(numbers, collected))


@torch.no_grad()
def score_responses(
    model: PreTrainedModel,
    batch: TrainBatch,
    micro_batches: Iterable[MicroBatch],
    reading: Reading,
    replay: RouteReplay | None = None,
    shape: tuple[int, ...] = (),
) -> torch.Tensor:
    """Return [sum of R_i, *shape] float32: the reading at each response token, sample after sample.

    Tokens of other ranks are 0. `replay` is that of `accumulate_gradients`.
    """
    ends = np.cumsum(batch.response_lengths)
    scores = torch.zeros(int(ends[-1]), *shape, device=model.device)
    for micro_batch in micro_batches:
        tokens = collate_responses(batch, micro_batch.samples, model.device)
        with replayed_routes(replay, tokens):
            read = reading(_logits(model, batch, micro_batch, tokens), tokens)
        if micro_batch.counted:
            places = [np.arange(ends[i] - batch.response_lengths[i], ends[i]) for i in micro_batch.samples]
            scores[torch.from_numpy(np.concatenate(places)).to(model.device)] = read
    return scores


def _counted(batch: TrainBatch, micro_batch: MicroBatch, tokens: Tokens) -> torch.Tensor | None:
    """Return [B * L] bool: the tokens that are not padding; None where the micro-batch does not count."""
    if not micro_batch.counted:
        return None
    lengths = torch.tensor([[len(batch.input_ids[i])] for i in micro_batch.samples], device=tokens.input_ids.device)
    return (torch.arange(tokens.input_ids.shape[1], device=lengths.device) < lengths).flatten()


def replayed_routes(replay: RouteReplay | None, tokens: Tokens) -> AbstractContextManager[None]:
    """Return a context in which the model uses the recorded experts of the micro-batch's tokens."""
    if replay is None:
        return nullcontext()
    return replay.replaying(None if tokens.routed_experts is None else tokens.routed_experts.flatten(0, 1))


def _logits(model: PreTrainedModel, batch: TrainBatch, micro_batch: MicroBatch, tokens: Tokens) -> torch.Tensor:
    """Return [N, outputs] of the output layer at the chosen tokens."""
    if batch.images is None:
        return response_logits(model, tokens.input_ids, tokens.positions)
    from cairn.engines.models.vision import seeing  # only some models need it

    sequences = [batch.input_ids[i] for i in micro_batch.samples]
    with seeing(model, sequences, [batch.images[i] for i in micro_batch.samples]) as images:
        return response_logits(model, tokens.input_ids, tokens.positions, **images)
