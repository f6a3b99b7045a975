"""Conversion of samples to the tensors of a micro-batch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cairn.engines.models.routing import FREE
from cairn.engines.training.aggregations import Weight
from cairn.engines.training.log_probs import LogitSupport
from cairn.engines.types.types import TrainBatch

MISMATCH = "routing_mismatch"
"""Metric: the share of the rollout's expert choices, where they were replayed, that the trained model's router would
not have made. A choice is one expert of one mixture layer for one token."""


def routed_choices(batch: TrainBatch, samples: Iterable[int]) -> int:
    """Return the number of expert choices that the rollout recorded for some samples of a batch."""
    if batch.routed_choices is not None:
        return sum(batch.routed_choices[sample] for sample in samples)
    routed = batch.routed_experts or [None] * len(batch)
    return sum(experts.size for sample in samples if (experts := routed[sample]) is not None)


LOSS_FIELDS = (
    *("advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs"),
    *("teacher_top_log_probs", "values", "returns", "picked"),
)
"""Fields of a batch and of `Tokens` with a float for each trained token, or k floats."""


@dataclass(frozen=True)
class Tokens:
    """A right-padded micro-batch of B samples and its N chosen response tokens, sample after sample."""

    input_ids: torch.Tensor
    """[B, L] int64."""
    positions: torch.Tensor
    """[N] int64 into the flattened [B * L]: the position that predicts each chosen token, one before its own."""
    targets: torch.Tensor
    """[N] int64: the chosen tokens."""
    weights: torch.Tensor
    """[N] float32: each token's weight in the policy's loss of the optimizer step."""
    shares: torch.Tensor
    """[N] float32: each token's weight in metrics, which are means over the trained tokens of the optimizer step."""
    samples: torch.Tensor
    """[N] int64: each token's sample, as an index into the B samples."""
    groups: torch.Tensor
    """[B] int64: the group of each sample, the same number in every micro-batch and on every rank."""
    counts: torch.Tensor
    """[B] float32: chosen tokens of each sample, including those that other ranks hold."""
    advantages: torch.Tensor | None = None
    """[N] float32, like the fields below."""
    old_log_probs: torch.Tensor | None = None
    """Proximal policy: the trainer's log-probs at the start of the update, or with `use_rollout_logprobs` the rollout
    engine's."""
    rollout_log_probs: torch.Tensor | None = None
    """Behaviour policy, which sampled the tokens: the log-probs that the rollout engine returned."""
    ref_log_probs: torch.Tensor | None = None
    teacher_log_probs: torch.Tensor | None = None
    teacher_top_log_probs: torch.Tensor | None = None
    """[N, k] float32: log-probs of the teacher's most probable tokens (`cairn.engines.training.log_probs.top_rows`)."""
    teacher_top_ids: torch.Tensor | None = None
    """[N, k] int64: ids of these tokens."""
    top_log_probs: torch.Tensor | None = None
    """[N, k] float32, differentiable: the current policy's log-probs of the same tokens."""
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    picked: torch.Tensor | None = None
    """1 at the tokens that the loss treats differently, 0 at the others; None for a loss that picks none."""
    kept: LogitSupport | None = None
    """Sampling support of the tokens; None where it is the whole vocabulary."""
    routed_experts: torch.Tensor | None = None
    """[B, L, layers, top-k] int16: the experts to use for each token, `cairn.engines.models.routing.FREE` where the
    model chooses; None where it chooses for all tokens."""
    mean_correction: float | None = None
    """Divisor of the off-policy correction weights; None for no division."""
    value_weights: torch.Tensor | None = None
    """[N] float32: each token's weight in the critic's loss; None where it equals `shares`."""
    over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Differentiable sum of a tensor over the ranks that hold parts of the same samples; None where this rank holds
    all of them."""

    @property
    def behaviour(self) -> torch.Tensor:
        """[N] float32: log-probs of the policy that sampled the tokens, as its engine returned them.

        Raises ValueError where the batch lacks them.
        """
        return require_field(self.rollout_log_probs)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return [B] sums over each sample, from [N] values of tokens, including its tokens on other ranks."""
        own = torch.zeros_like(self.counts).index_add(0, self.samples, values.to(self.counts.dtype))
        return own if self.over_ranks is None else self.over_ranks(own)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """Return [B] means over each sample, from [N] values of tokens; 0 for a sample without a chosen token."""
        return self.sums(values) / self.counts.clamp(min=1)

    def of_tokens(self, per_sample: torch.Tensor) -> torch.Tensor:
        """Return [N] values of tokens, from [B] values of samples: every token gets its sample's value."""
        return per_sample[self.samples]

    def weighted_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return a scalar: this micro-batch's share of the policy's loss."""
        return (self.weights * values).sum()

    def value_loss(self, values: torch.Tensor) -> torch.Tensor:
        """Return a scalar: this micro-batch's share of the critic's loss."""
        return ((self.shares if self.value_weights is None else self.value_weights) * values).sum()

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return a scalar: this micro-batch's share of a mean over the optimizer step."""
        return (self.shares * values).sum()


def collate_trained(
    batch: TrainBatch, samples: Sequence[int], weights: Sequence[Weight], device: torch.device
) -> Tokens:
    """Return the trained tokens of some samples.

    Args:
        weights: weights of each sample's tokens.
    """
    masks = [batch.loss_mask[sample].astype(bool) for sample in samples]
    chosen = [np.flatnonzero(mask) for mask in masks]

    def pick(field: list[np.ndarray] | None, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        if field is None:
            return None
        values = [field[sample][mask] for sample, mask in zip(samples, masks, strict=True)]
        return torch.from_numpy(np.concatenate(values)).to(device, dtype)

    counts = [len(places) for places in chosen]

    def spread(of_samples: Sequence[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(of_samples, np.float32), counts)).to(device)

    fields = _membership(batch, samples, counts, device)
    fields |= {name: pick(getattr(batch, name)) for name in LOSS_FIELDS}
    return Tokens(
        *_collate(batch, samples, chosen, device),
        **fields,
        weights=spread([weight.loss for weight in weights]),
        shares=spread([weight.share for weight in weights]),
        value_weights=spread([weight.value for weight in weights]),
        teacher_top_ids=pick(batch.teacher_top_ids, torch.int64),
        kept=_support(batch, samples, chosen, device),
        routed_experts=_routed(batch, samples, device),
        mean_correction=batch.mean_correction,
    )


def collate_responses(batch: TrainBatch, samples: Sequence[int], device: torch.device) -> Tokens:
    """Return all response tokens of some samples, without weights or loss fields."""
    chosen = [np.arange(batch.response_lengths[sample]) for sample in samples]
    input_ids, positions, targets = _collate(batch, samples, chosen, device)
    nothing = torch.zeros(len(targets), device=device)
    return Tokens(
        input_ids,
        positions,
        targets,
        **_membership(batch, samples, [len(places) for places in chosen], device),
        weights=nothing,
        shares=nothing,
        kept=_support(batch, samples, chosen, device),
        routed_experts=_routed(batch, samples, device),
    )


def require_field(values: torch.Tensor | None) -> torch.Tensor:
    """Return a required field. Raises ValueError where it is None."""
    if values is None:
        raise ValueError("the batch lacks a field that its loss reads")
    return values


def _membership(
    batch: TrainBatch, samples: Sequence[int], counts: Sequence[int], device: torch.device
) -> dict[str, Any]:
    """Return the fields `samples`, `groups` and `counts` of `Tokens`.

    Args:
        counts: number of chosen tokens of each sample.
    """
    groups = np.arange(len(batch)) if batch.groups is None else np.asarray(batch.groups)
    return {
        "samples": torch.from_numpy(np.repeat(np.arange(len(samples)), counts)).to(device),
        "groups": torch.from_numpy(groups[list(samples)].astype(np.int64)).to(device),
        "counts": torch.tensor(counts, dtype=torch.float32, device=device),
    }


def _support(
    batch: TrainBatch, samples: Sequence[int], chosen: Sequence[np.ndarray], device: torch.device
) -> LogitSupport | None:
    """Return the sampling support of the chosen tokens.

    Args:
        chosen: each sample's chosen response tokens, counted from the start of the response.
    """
    if batch.kept is None:
        return None
    return LogitSupport.of(
        [batch.kept[sample].at(picked) for sample, picked in zip(samples, chosen, strict=True)], device
    )


def _routed(batch: TrainBatch, samples: Sequence[int], device: torch.device) -> torch.Tensor | None:
    recorded = [] if batch.routed_experts is None else [batch.routed_experts[sample] for sample in samples]
    shape = next((experts.shape[1:] for experts in recorded if experts is not None), None)
    if shape is None:
        return None
    longest = max(len(batch.input_ids[sample]) for sample in samples)
    routed = np.full((len(recorded), longest, *shape), FREE, np.int16)
    for row, experts in enumerate(recorded):
        if experts is not None:
            routed[row, : len(experts)] = experts
    return torch.from_numpy(routed).to(device)


def _collate(
    batch: TrainBatch, samples: Sequence[int], chosen: list[np.ndarray], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `input_ids`, `positions` and `targets` of `Tokens`.

    Args:
        chosen: each sample's chosen response tokens, counted from the start of the response.
    """
    rows = [batch.input_ids[sample] for sample in samples]
    input_ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    positions, targets = [], []
    for row, (sample, ids, picked) in enumerate(zip(samples, rows, chosen, strict=True)):
        input_ids[row, : len(ids)] = ids
        places = len(ids) - batch.response_lengths[sample] + picked
        positions.append(row * input_ids.shape[1] + places - 1)
        targets.append(ids[places].astype(np.int64))
    return (
        torch.from_numpy(input_ids).to(device),
        torch.from_numpy(np.concatenate(positions)).to(device),
        torch.from_numpy(np.concatenate(targets)).to(device),
    )
