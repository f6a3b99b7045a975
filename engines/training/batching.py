"""Cutting a step's samples into micro-batches of similar lengths."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatch:
    """Samples that pass through the model together, padded on the right to the longest of them."""

    samples: tuple[int, ...]
    """Indices into the batch, longest sample first."""
    counted: bool = True
    """False for a repetition that only keeps a rank company: its results are dropped."""


def plan_micro_batches(lengths: dict[int, int], max_tokens: int | None, world_size: int = 1) -> list[list[MicroBatch]]:
    """The micro-batches of every rank: equally many for each, every sample in exactly one that counts.

    Samples are sorted by length, so little is padded, and the micro-batches that the ranks run at the same time are
    neighbours in that order. A function of its arguments alone.

    Args:
        lengths: tokens of every sample, by its index in the batch; not empty.
        max_tokens: most tokens of a micro-batch, padding included; a longer sample is one by itself. None makes one
            micro-batch a rank.
        world_size: ranks.
    """
    order = sorted(lengths, key=lambda sample: (-lengths[sample], sample))
    if max_tokens is None:
        groups = [order[rank::world_size] for rank in range(min(world_size, len(order)))]
    else:
        groups = _fill(order, lengths, max_tokens)
        _split_to_multiple(groups, lengths, world_size)
    plan = [MicroBatch(tuple(group)) for group in groups]
    while len(plan) % world_size:
        plan.append(MicroBatch((order[-1],), counted=False))
    return [plan[rank::world_size] for rank in range(world_size)]


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


def split_steps(count: int, num_steps: int) -> list[range]:
    """The samples of each optimizer step: equal contiguous parts, in order.

    Raises:
        ValueError: `count` samples are not divisible by `num_steps`.
    """
    if num_steps < 1 or count == 0 or count % num_steps:
        raise ValueError(f"{count} samples cannot be cut into {num_steps} optimizer steps of equal size")
    size: int = count // num_steps
    return [range(start, start + size) for start in range(0, count, size)]
