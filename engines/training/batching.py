"""Cutting a step's samples into micro-batches: of similar lengths where they are padded, equally full where packed."""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class MicroBatch:
    """Samples that pass through the model together."""

    samples: tuple[int, ...]
    """Indices into the batch, longest sample first."""
    counted: bool = True
    """False for a repetition that only keeps a rank company: its results are dropped."""


def plan_micro_batches(
    lengths: dict[int, int], max_tokens: int | None, world_size: int = 1, *, most_samples: int | None = None
) -> list[list[MicroBatch]]:
    """The micro-batches of every rank, whose samples are padded to the longest of them: equally many for each rank,
    every sample in exactly one that counts.

    Samples are sorted by length, so little is padded, and the micro-batches that the ranks run at the same time are
    neighbours in that order. A function of its arguments alone.

    Args:
        lengths: tokens of every sample, by its index in the batch; not empty.
        max_tokens: most tokens of a micro-batch, padding included; a longer sample is one by itself. None makes one
            micro-batch a rank, unless `most_samples` is given.
        world_size: ranks.
        most_samples: of a micro-batch.
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
    """The micro-batches of every rank, whose samples are packed one behind the other: equally many for each rank, every
    sample in exactly one that counts.

    The longest sample that is left goes to the micro-batch with the fewest tokens; if it has no room there, more
    micro-batches are made. Those that the ranks run at the same time are neighbours by the work that attention makes,
    the squares of the lengths; of these the most goes to the rank that has had the least. A function of its arguments
    alone.

    Args:
        lengths: tokens of every sample, those it is padded with included, by its index in the batch; not empty.
        max_tokens: most tokens of a micro-batch; a longer sample is one by itself. None makes as few as there can be.
        ranks: with samples of their own.
        multiple: each rank's micro-batches are a multiple of it.
        most_samples: of a micro-batch.
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
    """Samples in `count` groups, each into the one that is least full of those that may have another; None where one
    has no room."""
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
    """Halve the largest micro-batches, in place, until their number is a multiple of `world_size` or all are single."""

    def size(group: list[int]) -> int:
        return len(group) * lengths[group[0]] if len(group) > 1 else 0

    while len(groups) % world_size and any(map(size, groups)):
        largest = max(range(len(groups)), key=lambda index: size(groups[index]))
        group = groups[largest]
        groups[largest : largest + 1] = [group[: len(group) // 2], group[len(group) // 2 :]]


def split_steps(samples: Sequence[int], num_steps: int) -> list[range]:
    """The sequences of each optimizer step: contiguous parts, in order, of equally many samples.

    Args:
        samples: which sample each sequence is of, from 0, in order: those of one are trained on in one step.

    Raises:
        ValueError: the samples are not divisible by `num_steps`.
    """
    count = samples[-1] + 1 if samples else 0
    if num_steps < 1 or count == 0 or count % num_steps:
        raise ValueError(f"{count} samples cannot be cut into {num_steps} optimizer steps of equal size")
    cuts = [bisect_left(samples, step * count // num_steps) for step in range(num_steps + 1)]
    return [range(start, end) for start, end in pairwise(cuts)]
