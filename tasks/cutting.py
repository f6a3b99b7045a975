"""Partial rollout in rounds of tokens: what is cut off depends on no time, and on no total of tokens.

    a round      every open sample goes on for at most `rollout.cut_tokens` response tokens, from its whole prefix
    after it     groups of which all samples have ended are counted, but for those of which one failed
    enough       what is still open is given back as it is, a part that a later shard continues
    else         the next round

How many tokens a sample took says in which round it ended. So an attempt that finds samples which an earlier one logged
counts them after the rounds in which they ended there, generates the others in those that they would have been in, and
stops after the same one.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

import pyarrow as pa
import pyarrow.compute as pc

from cairn.engines.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types import FinishReason
from cairn.tasks.groups import Group

Generate = Callable[[Sequence[SampleRequest]], Iterator[list[GeneratedSample]]]
"""Gives each sample once, those that are cut off as parts."""


def in_rounds(
    generate: Generate, samples: Sequence[SampleRequest], *, cut_tokens: int, enough: int, ended: Mapping[int, int]
) -> Iterator[list[GeneratedSample]]:
    """Generate samples until `enough` groups have ended; yield each as it ends, and those still open in the end.

    `ended`: of groups of which samples have ended before, the round in which the last of them did (`rounds_of`). Groups
    of which one failed are not in it, and are none of `samples`; those of which one fails here are given up.
    """
    left = {sample.key: sample for sample in samples}
    begun = {key: 0 if sample.begun is None else len(sample.begun) for key, sample in left.items()}
    last = dict(ended)
    for done in count():
        open_groups = {group_id for group_id, _ in left}
        if sum(ended_in <= done and id not in open_groups for id, ended_in in last.items()) >= enough or not left:
            break
        asked = [replace(one, cut_at=begun[key] + (done + 1) * cut_tokens) for key, one in left.items()]
        failed = set[int]()
        for generated in generate(asked):
            for sample in generated:
                if sample.finish_reason == FinishReason.ABORT:
                    left[sample.key] = replace(left[sample.key], begun=sample.trajectory.segments[0])
                else:
                    del left[sample.key]
                    last[sample.group_id] = max(done + 1, last.get(sample.group_id, 0))
                if sample.error is not None:
                    failed.add(sample.group_id)
            yield [sample for sample in generated if sample.finish_reason != FinishReason.ABORT]
        left = {key: one for key, one in left.items() if key[0] not in failed}
        last = {id: ended_in for id, ended_in in last.items() if id not in failed}
    yield [GeneratedSample.aborted(sample) for sample in left.values()]


def rounds_of(new_tokens: int, cut_tokens: int | None) -> int:
    """Rounds in which a sample got so many tokens; one where nothing is cut."""
    return max(1, math.ceil(new_tokens / cut_tokens)) if cut_tokens is not None else 1


def ended_rounds(samples: pa.Table, groups: Mapping[int, Group], cut_tokens: int) -> dict[int, int]:
    """By group, the round in which the last of its samples ended, of rows of the rollout table that have."""
    lengths = pc.list_value_length(samples.column("response_ids")).to_pylist()
    keys = zip(samples.column("group_id").to_pylist(), samples.column("sample_index").to_pylist(), strict=True)
    found: dict[int, int] = {}
    for (group_id, index), length in zip(keys, lengths, strict=True):
        rounds = rounds_of(length - groups[group_id].carried_tokens(index), cut_tokens)
        found[group_id] = max(rounds, found.get(group_id, 0))
    return found
