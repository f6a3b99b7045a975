"""`reward`: grade the samples of one shard, while other shards still generate."""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa

from cairn.storage.commits import Commit, Step
from cairn.storage.schemas import REWARD, TRAJECTORIES, Status
from cairn.tasks.batch import with_optional
from cairn.tasks.rewards.pool import Graded, GraderPool
from cairn.tasks.rewards.sample import ResponseSegment, Sample
from cairn.tasks.sequences import last_trajectory
from cairn.tasks.step import Outcome, StepCall, durable


@durable(
    Step.REWARD,
    reads=("reward.rm_type", "reward.custom_rm_path", "reward.rm_timeout", "reward.rm_memory"),
)
def reward(step: StepCall, rollout: Commit) -> Outcome:
    """Grade every sample of the shard. A grader that fails, or takes too long, over a sample marks it failed, never
    zero; what failed while it was generated is not graded, and stays failed. A group that is not finished is graded
    when it is."""
    shard = graded_shard(step.run.grader, step.run.tokenizer, step.run.read(rollout))
    graded = [one for one in shard.results if one is not None]
    return Outcome(
        tables={"rewards.parquet": shard.table},
        metrics={"failed_samples": shard.failed, "graded_again": graded_again(graded)},
        timings={"grader_wait": max((g.waited for g in graded), default=0.0)},
    )


@dataclass(frozen=True)
class GradedShard:
    """What a grader makes of a rollout table, in the order of its rows."""

    table: pa.Table
    """REWARD."""
    results: tuple[Graded | None, ...]
    """None: the sample's group is not finished, and nothing was graded."""

    @property
    def failed(self) -> int:
        """Samples without a reward that are of finished groups."""
        return sum(one is not None and one.reward is None for one in self.results)


def graded_shard(grader: GraderPool, tokenizer: Any, rollout: pa.Table) -> GradedShard:
    """Grade the rows of a rollout table as the step does. The tokenizer is asked only where the grader sees whole
    samples. Raises as `GraderPool.grade`."""
    columns = ["group_id", "sample_index", "response_text", "label", "metadata", "status", "error"]
    if grader.sees_whole_samples:
        columns += ["response_ids", "prompt_text", "prompt_ids", "finish_reason", "segments"]
        columns.append(TRAJECTORIES.name)
    samples = with_optional(rollout, columns).to_pydict()
    pairs = list(zip(samples["group_id"], samples["status"], strict=True))
    unfinished = {group_id for group_id, status in pairs if status == Status.ABORTED}
    waits = [group_id in unfinished for group_id in samples["group_id"]]
    samples["metadata"] = [json.loads(metadata) if metadata else {} for metadata in samples["metadata"]]
    given = given_samples(grader, tokenizer, samples)
    ready = iter(
        grade_generated(
            grader,
            [sample for sample, later in zip(given, waits, strict=True) if not later],
            [error for error, later in zip(samples["error"], waits, strict=True) if not later],
        )
    )
    results = tuple(None if later else next(ready) for later in waits)
    graded = [one or Graded(None) for one in results]
    failed = [one is not None and one.reward is None for one in results]
    n = len(graded)
    table = pa.table(
        {
            "group_id": samples["group_id"],
            "sample_index": samples["sample_index"],
            "reward": [g.reward for g in graded],
            "components": [None if g.components is None else json.dumps(g.components) for g in graded],
            "grader": [grader.name] * n,
            "grader_version": [grader.version] * n,
            "status": [
                str(Status.FAILED) if bad else status for bad, status in zip(failed, samples["status"], strict=True)
            ],
            "error": [g.error for g in graded],
        },
        REWARD,
    )
    return GradedShard(table, results)


def given_samples(grader: GraderPool, tokenizer: Any, columns: Mapping[str, Sequence[Any]]) -> list[Sample]:
    """What the grader gets of samples: `response_text`, `label` and `metadata`, and if it sees whole samples
    `response_ids`, `prompt_text`, `prompt_ids`, `finish_reason`, `status`, `segments` and `trajectories` too. Of
    several trajectories the last one is the response."""
    simple = zip(columns["response_text"], columns["label"], columns["metadata"], strict=True)
    if not grader.sees_whole_samples:
        return [Sample(text, label, metadata) for text, label, metadata in simple]
    lengths = columns[TRAJECTORIES.name]
    responses = [list(last_trajectory(*one)) for one in zip(columns["response_ids"], lengths, strict=True)]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=False)
    return [
        Sample(
            text,
            label,
            metadata,
            response_with_special_tokens=texts[i],
            response_ids=tuple(map(int, responses[i])),
            prompt=columns["prompt_text"][i],
            prompt_ids=tuple(map(int, columns["prompt_ids"][i])),
            finish_reason=str(columns["finish_reason"][i]),
            status=str(columns["status"][i]),
            segments=_segments(tokenizer, columns["response_ids"][i], columns["segments"][i], lengths[i]),
        )
        for i, (text, label, metadata) in enumerate(simple)
    ]


def _segments(
    tokenizer: Any,
    response: Sequence[int],
    segments: Sequence[Mapping[str, Any]] | None,
    trajectories: Sequence[int] | None,
) -> tuple[ResponseSegment, ...]:
    ends = accumulate(segment["tokens"] for segment in segments or ())
    bounds = list(accumulate(trajectories or ()))
    found = []
    for segment, end in zip(segments or (), ends, strict=True):
        ids = tuple(map(int, response[end - segment["tokens"] : end]))
        trajectory = bisect_left(bounds, end) if bounds else 0
        found.append(ResponseSegment(ids, tokenizer.decode(ids), segment["call"] is not None, trajectory))
    return tuple(found)


def graded_again(graded: Sequence[Graded]) -> int:
    """Samples that were graded more than once."""
    return sum(g.tries > 1 for g in graded)


def grade_generated(grader: GraderPool, samples: Sequence[Sample], errors: Sequence[str | None]) -> list[Graded]:
    """Grade the samples whose generation did not fail; the others keep their error. In the order of the samples."""
    graded = iter(grader.grade([sample for sample, error in zip(samples, errors, strict=True) if error is None]))
    return [next(graded) if error is None else Graded(None, error=error) for error in errors]
