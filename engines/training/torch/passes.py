"""Passes of micro-batches through a model: with gradients to train, without to score."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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
from cairn.engines.training.packing import consecutive_order, pack, padded_length
from cairn.engines.training.protocol import merge, numbers
from cairn.engines.training.torch.attention import Segments
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


@dataclass(frozen=True)
class Rows:
    """What a model reads of a micro-batch on this rank: B rows of L tokens, and the chosen tokens that it predicts."""

    tokens: Tokens
    """Chosen tokens of this rank; their `positions` index the flattened [B * L]."""
    input_ids: torch.Tensor
    """[B, L] int64."""
    real: torch.Tensor
    """[B * L] bool: which tokens are not padding."""
    routed: torch.Tensor | None
    """[B * L, layers, top-k]: the experts to use for each token, as in `Tokens`."""
    inputs: AbstractContextManager[Mapping[str, Any]]
    """Context of the forward pass; gives its arguments besides `input_ids`."""
    order: torch.Tensor | None = None
    """[N] int64: index of each chosen token among those of the whole micro-batch; None where this rank has all."""

    def logits(self, model: PreTrainedModel) -> torch.Tensor:
        """Return [N, outputs] of the output layer at the chosen tokens."""
        with self.inputs as inputs:
            return response_logits(model, self.input_ids, self.tokens.positions, **inputs)


Layout = Callable[[PreTrainedModel, TrainBatch, Sequence[int], Tokens], Rows]
"""(model, batch, samples of a micro-batch, its chosen tokens) → the rows that the model reads."""


def padded_rows(model: PreTrainedModel, batch: TrainBatch, samples: Sequence[int], tokens: Tokens) -> Rows:
    """Return a row for each sample, padded on the right."""
    routed = None if tokens.routed_experts is None else tokens.routed_experts.flatten(0, 1)
    lengths = torch.tensor([[len(batch.input_ids[i])] for i in samples], device=tokens.input_ids.device)
    real = (torch.arange(tokens.input_ids.shape[1], device=lengths.device) < lengths).flatten()
    inputs: AbstractContextManager[Mapping[str, Any]] = nullcontext({})
    if batch.images is not None:
        from cairn.engines.models.vision import seeing  # only some models need it

        inputs = seeing(model, [batch.input_ids[i] for i in samples], [batch.images[i] for i in samples])
    return Rows(tokens, tokens.input_ids, real, routed, inputs)


def packed_row(
    model: PreTrainedModel,
    batch: TrainBatch,
    samples: Sequence[int],
    tokens: Tokens,
    *,
    group: dist.ProcessGroup | None = None,
) -> Rows:
    """Return this rank's part of one row of all samples, one after the other.

    The model must have `cairn.engines.training.torch.attention.use_packed_attention`.

    Args:
        group: the ranks that share the row, in consecutive parts of equal length; None where this rank has all of it.

    Raises:
        ValueError: the batch has images.
    """
    if batch.images is not None:
        raise ValueError("samples with images cannot be packed: leave training.sequence_packing out")
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    lengths = [len(batch.input_ids[i]) for i in samples]
    lengths[-1] += padded_length(sum(lengths), ranks) - sum(lengths)
    places = consecutive_order(lengths, ranks, rank)
    packed = pack(batch, samples, tokens, lengths=lengths, places=places, group=group)
    inputs = {"position_ids": packed.position_ids, "segments": Segments(lengths, model.device, group)}
    return Rows(packed.tokens, packed.input_ids, packed.real, packed.routed, nullcontext(inputs), packed.order)


def accumulate_gradients(
    model: PreTrainedModel,
    batch: TrainBatch,
    micro_batches: Iterable[MicroBatch],
    weights: dict[int, Weight],
    objective: Objective,
    replay: RouteReplay | None = None,
    balance: Balance | None = None,
    layout: Layout = padded_rows,
) -> dict[str, float]:
    """Add this rank's share of the loss's gradient to the parameters' gradients. Return its share of every metric.

    Args:
        weights: weights of each sample's trained tokens in the loss of the optimizer step.
        replay: makes the model use the experts that the rollout chose, where the batch has them.
        balance: counts the tokens of each expert.
        layout: how the model reads the samples of a micro-batch.
    """
    collected = []
    routed = routed_choices(batch, weights)
    for micro_batch in micro_batches:
        token_weights = [weights[i] if micro_batch.counted else NO_WEIGHT for i in micro_batch.samples]
        tokens = collate_trained(batch, micro_batch.samples, token_weights, model.device)
        rows = layout(model, batch, micro_batch.samples, tokens)
        with nullcontext() if replay is None else replay.replaying(rows.routed):
            counted = rows.real if micro_batch.counted else None
            with nullcontext() if balance is None else balance.counting(counted):
                logits = rows.logits(model)
            loss, metrics = objective(logits, rows.tokens)
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
    layout: Layout = padded_rows,
) -> torch.Tensor:
    """Return [sum of R_i, *shape] float32: the reading at each response token, sample after sample.

    Tokens of other ranks are 0. `replay` and `layout` are those of `accumulate_gradients`.
    """
    ends = np.cumsum(batch.response_lengths)
    scores = torch.zeros(int(ends[-1]), *shape, device=model.device)
    for micro_batch in micro_batches:
        tokens = collate_responses(batch, micro_batch.samples, model.device)
        rows = layout(model, batch, micro_batch.samples, tokens)
        with nullcontext() if replay is None else replay.replaying(rows.routed):
            read = reading(rows.logits(model), rows.tokens)
        if micro_batch.counted:
            ranges = [np.arange(ends[i] - batch.response_lengths[i], ends[i]) for i in micro_batch.samples]
            places = torch.from_numpy(np.concatenate(ranges)).to(model.device)
            scores[places if rows.order is None else places[rows.order]] = read
    return scores
