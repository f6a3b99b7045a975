"""Checks of a batch, and its division into optimizer steps and micro-batches.

Micro-batches that are padded hold samples of similar lengths; packed micro-batches are equally full.
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.needs import loss_needs, old_policy_is_current
from cairn.engines.types.batches import BatchOutline
from cairn.engines.types.types import TrainBatch

PER_TOKEN = (
    "loss_mask",
    "divisor_mask",
    "advantages",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "teacher_top_log_probs",
    "teacher_top_ids",
    "values",
    "returns",
    "kept",
)
"""Fields with an entry for each response token."""


def check_batch(batch: TrainBatch, own: Iterable[int] | None = None) -> None:
    """Check that the fields of a batch are consistent with each other.

    Args:
        own: sequences that this rank holds; None where it holds all.

    Raises:
        ValueError: names the field and the sample.
    """
    own = range(len(batch)) if own is None else sorted(own)
    if len(batch) == 0:
        raise ValueError("the batch holds no samples")
    for name in ("response_lengths", "loss_mask"):
        if len(getattr(batch, name)) != len(batch):
            raise ValueError(f"{name} has {len(getattr(batch, name))} entries for {len(batch)} samples")
    for name in ("groups", "images"):
        of_samples = getattr(batch, name)
        if of_samples is not None and len(of_samples) != len(batch):
            raise ValueError(f"{name} has {len(of_samples)} entries for {len(batch)} samples")
    if batch.samples is not None:
        if len(batch.samples) != len(batch):
            raise ValueError(f"samples has {len(batch.samples)} entries for {len(batch)} sequences")
        if not set(np.diff(batch.samples, prepend=-1).tolist()) <= {0, 1} or batch.samples[0] != 0:
            raise ValueError("samples does not count the samples from 0, one after the other")
    for sample in own:
        ids, length = batch.input_ids[sample], batch.response_lengths[sample]
        if not 0 <= length < len(ids):
            raise ValueError(
                f"sample {sample} has {len(ids)} tokens, {length} of them in the response: its prompt must not be empty"
            )
    for name in PER_TOKEN:
        field: list[np.ndarray] | None = getattr(batch, name)
        if field is None:
            continue
        if len(field) != len(batch):
            raise ValueError(f"{name} has {len(field)} entries for {len(batch)} samples")
        for sample in own:
            values, length = field[sample], batch.response_lengths[sample]
            if len(values) != length:
                raise ValueError(f"{name} of sample {sample} has {len(values)} entries for {length} response tokens")
    for sample, experts in ((sample, batch.routed_experts[sample]) for sample in own if batch.routed_experts):
        if experts is not None and len(experts) != len(batch.input_ids[sample]) - 1:
            raise ValueError(
                f"routed_experts of sample {sample} has {len(experts)} entries for {len(batch.input_ids[sample])} "
                "tokens: it needs one for each but the last"
            )
    for sample, support in ((sample, batch.kept[sample]) for sample in own if batch.kept):
        ids, length = batch.input_ids[sample], batch.response_lengths[sample]
        place = support.first_without(ids[len(ids) - length :])
        if place is not None:
            raise ValueError(f"response token {place} of sample {sample} is not among those it was drawn from")


def check_steps(outline: BatchOutline, steps: Sequence[range]) -> None:
    """Check that every optimizer step has a trained token.

    Raises:
        ValueError: names the step.
    """
    for number, samples in enumerate(steps):
        if not any(outline.trained[sample] for sample in samples):
            raise ValueError(
                f"optimizer step {number + 1} of {len(steps)} has no trained token: the loss masks of its samples "
                f"({samples.start} to {samples.stop - 1}) are all zero"
            )


def check_fields(batch: TrainBatch, num_steps: int, algorithm: AlgorithmConfig) -> None:
    """Check that a batch for some optimizer steps holds what its loss reads.

    Raises:
        ValueError: names the field.
    """
    needs = loss_needs(algorithm)
    for name, why in needs.items():
        if getattr(batch, name) is None and (
            name != "old_log_probs" or not old_policy_is_current(algorithm, num_steps=1)
        ):
            raise ValueError(f"the batch has no {name}, which algorithm.{why} needs")
    if "old_log_probs" in needs and batch.old_log_probs is None and num_steps > 1:
        raise ValueError(
            "the batch has no old_log_probs: the current policy can replace the old one only in a single optimizer "
            f"step, but {num_steps} are requested; score the batch first"
        )


@dataclass(frozen=True)
class MicroBatch:
    """Samples that pass through the model together."""

    samples: tuple[int, ...]
    """Indices into the batch, longest sample first."""
    counted: bool = True
    """False for a repeated sample that only fills up a rank's number of micro-batches; its results are dropped."""


def plan_micro_batches(
    lengths: dict[int, int], max_tokens: int | None, world_size: int = 1, *, most_samples: int | None = None
) -> list[list[MicroBatch]]:
    """Return the micro-batches of every rank, whose samples are padded to the longest of them.

    All ranks get equally many micro-batches, and every sample is in exactly one that counts. Samples are sorted by
    length, so there is little padding. The micro-batches that the ranks run at the same time are neighbours in that
    order. The result depends on the arguments alone.

    Args:
        lengths: tokens of every sample, by its index in the batch; not empty.
        max_tokens: most tokens of a micro-batch, padding included; a longer sample is a micro-batch by itself. None
            makes one micro-batch per rank, unless `most_samples` is set.
        world_size: number of ranks.
        most_samples: most samples of a micro-batch.
    """
    order = sorted(lengths, key=lambda sample: (-lengths[sample], sample))
    if most_samples is not None:
        groups = [order[start : start + most_samples] for start in range(0, len(order), most_samples)]
        _split_to_multiple(groups, lengths, world_size)
    elif max_tokens is None:
        groups = [order[rank::world_size] for rank in range(min(world_size, len(order)))]
    else:
        groups = _fill(order, lengths, max_tokens)
        _split_to_multiple(groups, lengths, world_size)
    plan = [MicroBatch(tuple(group)) for group in groups]
    while len(plan) % world_size:
        plan.append(MicroBatch((order[-1],), counted=False))
    return [plan[rank::world_size] for rank in range(world_size)]


def pack_micro_batches(
    lengths: dict[int, int], max_tokens: int | None, ranks: int, multiple: int = 1, *, most_samples: int | None = None
) -> list[list[MicroBatch]]:
    """Return the micro-batches of every rank, whose samples are packed one after the other.

    All ranks get equally many micro-batches, and every sample is in exactly one that counts. The longest remaining
    sample goes to the micro-batch with the fewest tokens. If that has no room, more micro-batches are made. The
    micro-batches that the ranks run at the same time are neighbours in attention cost, the sum of the squared lengths.
    Among these, the most expensive one goes to the rank with the least work so far. The result depends on the arguments
    alone.

    Args:
        lengths: tokens of every sample, padding included, by its index in the batch; not empty.
        max_tokens: most tokens of a micro-batch; a longer sample is a micro-batch by itself. None makes as few
            micro-batches as possible.
        ranks: number of ranks with samples of their own.
        multiple: the number of each rank's micro-batches is a multiple of it.
        most_samples: most samples of a micro-batch.
    """
    order = sorted(lengths, key=lambda sample: (-lengths[sample], sample))
    limit = max_tokens or sum(lengths.values())
    least = sum(min(length, limit) for length in lengths.values())
    step = ranks * multiple
    count = -(-least // (limit * step)) * step
    if most_samples is not None:
        count = max(count, -(-len(order) // (most_samples * step)) * step)
    while (groups := _spread(order, lengths, limit, count, most_samples)) is None:
        count += step

    def work(group: list[int]) -> int:
        return sum(lengths[sample] ** 2 for sample in group)

    groups.sort(key=lambda group: (-work(group), group))
    plan: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    done = [0] * ranks
    for first in range(0, count, ranks):
        idle = sorted(range(ranks), key=lambda rank: (done[rank], rank))
        for rank, group in zip(idle, groups[first : first + ranks], strict=True):
            done[rank] += work(group)
            plan[rank].append(MicroBatch(tuple(group)) if group else MicroBatch((order[-1],), counted=False))
    return plan


def _spread(
    order: list[int], lengths: dict[int, int], limit: int, count: int, most_samples: int | None
) -> list[list[int]] | None:
    """Distribute samples over `count` groups, each to the emptiest group that may take another sample.

    Returns None where a sample has no room.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    filled = [(0, index) for index in range(count)]
    for sample in order:
        tokens, index = filled[0]
        tokens += min(lengths[sample], limit)
        if tokens > limit:
            return None
        groups[index].append(sample)
        if len(groups[index]) == most_samples:
            heapq.heappop(filled)
        else:
            heapq.heapreplace(filled, (tokens, index))
    return groups


def _fill(order: list[int], lengths: dict[int, int], max_tokens: int) -> list[list[int]]:
    groups, start = [], 0
    while start < len(order):
        rows = max(1, max_tokens // max(1, lengths[order[start]]))
        groups.append(order[start : start + rows])
        start += rows
    return groups


def _split_to_multiple(groups: list[list[int]], lengths: dict[int, int], world_size: int) -> None:
    """Halve the largest micro-batches in place.

    Stop when their number is a multiple of `world_size` or all hold a single sample.
    """

    def size(group: list[int]) -> int:
        return len(group) * lengths[group[0]] if len(group) > 1 else 0

    while len(groups) % world_size and any(map(size, groups)):
        largest = max(range(len(groups)), key=lambda index: size(groups[index]))
        group = groups[largest]
        groups[largest : largest + 1] = [group[: len(group) // 2], group[len(group) // 2 :]]


def split_steps(samples: Sequence[int], num_steps: int) -> list[range]:
    """Return the sequences of each optimizer step: contiguous parts, in order, with equally many samples.

    Args:
        samples: the sample that each sequence belongs to, from 0, in order. All sequences of a sample are trained on in
            the same step.

    Raises:
        ValueError: the number of samples is not divisible by `num_steps`.
    """
    count = samples[-1] + 1 if samples else 0
    if num_steps < 1 or count == 0 or count % num_steps:
        raise ValueError(f"{count} samples cannot be cut into {num_steps} optimizer steps of equal size")
    cuts = [bisect_left(samples, step * count // num_steps) for step in range(num_steps + 1)]
    return [range(start, end) for start, end in pairwise(cuts)]
