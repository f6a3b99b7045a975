"""The order in which the samples of a step are generated, and where that ends: with all of them, with enough groups, or
after rounds of tokens."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TypeVar

from cairn.engines.types.errors import EngineError
from cairn.engines.types.keeping import SampleEnd, WantedSample
from cairn.engines.types.trajectories import GeneratedSample, SampleKey, SampleRequest
from cairn.engines.types.types import FinishReason

Request = SampleRequest | WantedSample
Result = TypeVar("Result", GeneratedSample, SampleEnd)


class Unfinished:
    """Samples that an engine has not returned yet, by group, and the number of groups still needed."""

    def __init__(self, needed: int | None) -> None:
        """Create the tally. `needed`: number of groups; None for all of them."""
        self._needed = needed
        self._left: dict[int, set[int]] = defaultdict(set)
        self._spoilt: set[int] = set()
        self._cuts: dict[SampleKey, int | None] = {}

    def add(self, samples: Iterable[Request]) -> None:
        """Add requested samples."""
        for sample in samples:
            self._left[sample.group_id].add(sample.index)
            self._cuts[sample.key] = sample.cut_at

    def take(self, sample: GeneratedSample | SampleEnd) -> None:
        """Remove a sample that the engine returned. A group that is finished and did not fail reduces the number
        needed."""
        left = self._left[sample.group_id]
        left.remove(sample.index)
        if sample.error is not None or sample.finish_reason == FinishReason.ABORT:
            self._spoilt.add(sample.group_id)
        if not left:
            del self._left[sample.group_id]
            if self._needed is not None and sample.group_id not in self._spoilt:
                self._needed -= 1

    def give_up(self, group_id: int) -> None:
        """Stop waiting for the samples of a group."""
        self._left.pop(group_id, None)

    def was_cut(self, sample: GeneratedSample | SampleEnd) -> bool:
        """Return whether a sample ended where its request cuts it."""
        return sample.tokens == self._cuts[sample.key]

    @property
    def is_enough(self) -> bool:
        """Whether no more groups are needed."""
        return self._needed is not None and self._needed <= 0

    @property
    def groups(self) -> dict[int, set[int]]:
        """Indices of the samples that were not returned yet, by group."""
        return {group_id: left for group_id, left in self._left.items() if left}


def until_enough(
    engine: str,
    stream: Iterator[list[Result]],
    unfinished: Unfinished,
    abort: Callable[[], None],
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[list[Result]]:
    """Take the samples of a stream from `unfinished` and yield them. Abort once enough groups are generated.

    Raises EngineError for samples that are missing at the end, and for one that was aborted although it was not cut.

    Args:
        engine: its name.
        abort: has the engine abort what it generates. Aborted samples are yielded too.
        interrupted: whether another thread does so.
    """
    aborted = False
    for samples in stream:
        may_abort = aborted or interrupted()
        for sample in samples:
            if not may_abort and sample.finish_reason == FinishReason.ABORT and not unfinished.was_cut(sample):
                raise EngineError(f"{engine} aborted a sample of group {sample.group_id} without a request")
            unfinished.take(sample)
        yield samples
        if unfinished.is_enough and unfinished.groups and not aborted:
            aborted = True
            abort()
    if unfinished.groups:
        lost = ", ".join(f"{sorted(indices)} of group {id}" for id, indices in unfinished.groups.items())
        raise EngineError(f"{engine} returned fewer samples than requested: {lost} are missing")


Wanted = TypeVar("Wanted", SampleRequest, WantedSample)


def longest_first(samples: Iterable[Wanted], means: Mapping[int, float]) -> list[Wanted]:
    """Return samples in the order in which they must begin; the samples of a prompt stay together.

    `means`: mean response length of a group's prompt, by group, where it is known.
    """
    return sorted(samples, key=lambda sample: -means.get(sample.group_id, float("inf")))


# Partial rollout in rounds of tokens: the cut depends neither on time nor on a total of tokens.


Generate = Callable[[Sequence[WantedSample]], Iterator[list[SampleEnd]]]
"""Function that yields the end of each sample once; cut samples end as aborted."""


def in_rounds(
    generate: Generate, samples: Sequence[WantedSample], *, cut_tokens: int, enough: int, ended: Mapping[int, int]
) -> Iterator[list[SampleEnd]]:
    """Generate samples in rounds until `enough` groups have ended. Yield the end of each sample, and those of the open
    ones last.

        a round      every open sample gets at most `rollout.cut_tokens` more response tokens, after its whole prefix
        after it     the groups whose samples have all ended are counted, except those with a failed sample
        enough       open samples stay as they are: parts that a later shard continues
        else         the next round

    The number of tokens of a sample determines the round in which it ended. So an attempt that finds samples which an
    earlier one logged counts them after the rounds in which they ended there, generates the others in their original
    rounds, and stops after the same round.

    Args:
        ended: for groups with samples that ended before, the round in which the last of these ended. Groups with a
            failed sample are neither in it nor in `samples`. Groups with a sample that fails here are given up.
    """
    left = {sample.key: sample for sample in samples}
    last = dict(ended)
    for done in count():
        open_groups = {group_id for group_id, _ in left}
        if sum(ended_in <= done and id not in open_groups for id, ended_in in last.items()) >= enough or not left:
            break
        failed = set[int]()
        for ends in generate([replace(one, cut_at=one.begun + (done + 1) * cut_tokens) for one in left.values()]):
            for end in ends:
                if end.finish_reason != FinishReason.ABORT:
                    del left[end.key]
                    last[end.group_id] = max(done + 1, last.get(end.group_id, 0))
                if end.error is not None:
                    failed.add(end.group_id)
            yield [end for end in ends if end.finish_reason != FinishReason.ABORT]
        left = {key: one for key, one in left.items() if key[0] not in failed}
        last = {id: ended_in for id, ended_in in last.items() if id not in failed}
    yield list(map(SampleEnd.aborted, left.values()))
