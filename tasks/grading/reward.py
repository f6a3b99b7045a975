"""`reward`: grade the samples of one shard, while other shards still generate."""

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.configs.errors import BadData
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.schemas import (
    RAW_REWARD,
    REWARD,
    TRAJECTORIES,
    TRAJECTORY_REWARDS,
    TRAJECTORY_ROLES,
    TURN_REWARDS,
    Status,
)
from cairn.storage.store.canonical import from_json
from cairn.tasks.batch.batch import arrays, with_optional
from cairn.tasks.batch.sequences import last_trajectory
from cairn.tasks.data.drawing import MixedData
from cairn.tasks.data.opening import Data
from cairn.tasks.data.prompts import PromptData, PromptRow
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.grading.shaping import SHAPED, Overlong, sampled_tokens, with_own_rewards, with_rewards
from cairn.tasks.rewards.grader import GRADER_OPTIONS, Graded, Grading, share_of_right
from cairn.tasks.rewards.sample import ResponseSegment, Sample


@durable(
    Step.REWARD,
    reads=(
        *GRADER_OPTIONS,
        "reward.overlong_buffer_len",
        "reward.overlong_penalty_factor",
        "rollout.rollout_max_response_len",
        "reward.reward_model",
        "algorithm.gdpo_reward_keys",
    ),
    externals=("reward_model",),
)
def reward(step: StepCall, rollout: Commit) -> Outcome:
    """Grade every sample of the shard. A grader that fails, or takes too long, over a sample marks it failed, never
    zero; what failed while it was generated is not graded, and stays failed. A group that is not finished is graded
    when it is."""
    overlong = Overlong.of(step.run.config)
    row = prompt_rows(step.run.data) if step.run.grader.sees_messages else None
    keys = step.run.config.algorithm.gdpo_reward_keys
    shard = graded_shard(step.run.grader, step.run.tokenizer, step.run.read(rollout), overlong, row, keys)
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


def graded_columns(grader: Grading, overlong: Overlong | None = None, tokens: bool = True) -> list[str]:
    """Those of a rollout table that `graded_shard` reads, with a tokenizer (`tokens`) or without; `with_optional` gives
    them."""
    columns = ["group_id", "sample_index", "response_text", "label", "metadata", "status", "error", TRAJECTORIES.name]
    if grader.sees_whole_samples:
        columns += ["prompt_text", "finish_reason", TRAJECTORY_REWARDS.name, TRAJECTORY_ROLES.name]
        columns += ["prompt_ids", TURN_REWARDS.name] if tokens else []
    if overlong is not None or (grader.sees_whole_samples and tokens):
        columns += ["response_ids", "segments"]
    if grader.sees_messages:
        columns.append("prompt_index")
    return columns


def graded_shard(
    grader: Grading,
    tokenizer: Any,
    rollout: pa.Table,
    overlong: Overlong | None = None,
    row: Callable[[int], PromptRow] | None = None,
    reward_keys: Collection[str] = (),
) -> GradedShard:
    """Grade the rows of a rollout table as the step does. The tokenizer is asked only where the grader sees whole
    samples, `row` of the data only where it sees messages. `overlong` is added to what the grader says. Raises as
    `Grading.grade`, and BadData where a row is not the one that was answered.

    Args:
        tokenizer: None where the grader sees no whole samples, or no tokens and the special ones make no tags of
            thoughts: it then gets whole samples without tokens.
        reward_keys: names of rewards without which a sample fails (`cairn.tasks.grading.shaping`).
    """
    columns = graded_columns(grader, overlong, tokens=tokenizer is not None)
    table = with_optional(rollout, columns)
    tokens = [name for name in columns if name in ("response_ids", "prompt_ids")]
    samples: dict[str, Any] = table.drop_columns(tokens).to_pydict() | {name: arrays(table, name) for name in tokens}
    if grader.sees_messages and row is not None:
        samples["messages"] = _messages(row, samples["prompt_index"], samples["prompt_text"])
    pairs = list(zip(samples["group_id"], samples["status"], strict=True))
    unfinished = {group_id for group_id, status in pairs if status == Status.ABORTED}
    waits = [group_id in unfinished for group_id in samples["group_id"]]
    samples["metadata"] = [from_json(metadata) if metadata else {} for metadata in samples["metadata"]]
    given = given_samples(grader, tokenizer, samples)
    ready = iter(
        grade_generated(
            grader,
            [sample for sample, later in zip(given, waits, strict=True) if not later],
            [error for error, later in zip(samples["error"], waits, strict=True) if not later],
            [group_id for group_id, later in zip(samples["group_id"], waits, strict=True) if not later],
        )
    )
    counts = [len(lengths or (0,)) for lengths in samples[TRAJECTORIES.name]]
    required = [key for key in reward_keys if overlong is None or key not in SHAPED]  # which shaping adds
    found = [
        (None, None) if later else with_own_rewards(with_rewards(next(ready), required, grader.name), count)
        for later, count in zip(waits, counts, strict=True)
    ]
    results, own = tuple(one for one, _ in found), [rewards for _, rewards in found]
    said = [one and one.reward for one in results]
    if overlong is not None:
        lengths = list(map(sampled_tokens, map(len, samples["response_ids"]), samples["segments"]))
        pairs_of = zip(results, lengths, strict=True)
        results = tuple(one and overlong.shaped(one, length) for one, length in pairs_of)
        own = [
            rewards and [reward + overlong.penalty(length) for reward in rewards]
            for rewards, length in zip(own, lengths, strict=True)
        ]
    graded = [one or Graded(None) for one in results]
    failed = [one is not None and one.reward is None for one in results]
    table = pa.table(
        {
            "group_id": samples["group_id"],
            "sample_index": samples["sample_index"],
            "reward": [g.reward for g in graded],
            "components": [None if g.components is None else json.dumps(g.components) for g in graded],
            "grader": [g.grader or grader.name for g in graded],
            "grader_version": [g.version or grader.version for g in graded],
            "status": [
                str(Status.FAILED) if bad else status for bad, status in zip(failed, samples["status"], strict=True)
            ],
            "error": [g.error for g in graded],
        },
        REWARD,
    )
    if overlong is not None:
        table = table.append_column(RAW_REWARD, pa.array(said, RAW_REWARD.type))
    if any(rewards is not None for rewards in own):
        table = table.append_column(TRAJECTORY_REWARDS, pa.array(own, TRAJECTORY_REWARDS.type))
    return GradedShard(table, results)


def given_samples(grader: Grading, tokenizer: Any, columns: Mapping[str, Sequence[Any]]) -> list[Sample]:
    """What the grader gets of samples: `response_text`, `label` and `metadata`, and if it sees whole samples
    `prompt_text`, `finish_reason` and `status`, with a tokenizer `response_ids`, `prompt_ids`, `segments` and
    `trajectories` too, and `messages` if it sees those; `trajectory_rewards`, `trajectory_roles` and `turn_rewards`
    where there are any. Of several trajectories the last one is the response."""
    simple = zip(columns["response_text"], columns["label"], columns["metadata"], strict=True)
    if not grader.sees_whole_samples:
        return [Sample(text, label, metadata) for text, label, metadata in simple]
    none = [None] * len(columns["response_text"])
    given, roles, turns = (
        columns.get(field.name, none) for field in (TRAJECTORY_REWARDS, TRAJECTORY_ROLES, TURN_REWARDS)
    )
    if tokenizer is None:
        return [
            Sample(
                text,
                label,
                metadata,
                prompt=columns["prompt_text"][i],
                finish_reason=columns["finish_reason"][i],
                status=columns["status"][i],
                rewards=tuple(given[i] or ()),
                roles=tuple(roles[i] or ()),
            )
            for i, (text, label, metadata) in enumerate(simple)
        ]
    sees_messages = grader.sees_messages and "messages" in columns
    lengths = columns[TRAJECTORIES.name]
    responses = [
        np.asarray(last_trajectory(*one), np.int32) for one in zip(columns["response_ids"], lengths, strict=True)
    ]
    # Of a list the tokenizer looks at every number before it decodes any.
    texts = tokenizer.batch_decode(responses, skip_special_tokens=False)
    return [
        Sample(
            text,
            label,
            metadata,
            response_with_special_tokens=texts[i],
            response_ids=tuple(responses[i].tolist()),
            prompt=columns["prompt_text"][i],
            prompt_ids=tuple(np.asarray(columns["prompt_ids"][i], np.int32).tolist()),
            finish_reason=str(columns["finish_reason"][i]),
            status=str(columns["status"][i]),
            segments=_segments(tokenizer, columns["response_ids"][i], columns["segments"][i], lengths[i], turns[i]),
            messages=columns["messages"][i] if sees_messages else (),
            rewards=tuple(given[i] or ()),
            roles=tuple(roles[i] or ()),
        )
        for i, (text, label, metadata) in enumerate(simple)
    ]


def prompt_rows(data: Data) -> Callable[[int], PromptRow]:
    """The rows of data that can be asked for again by their index. Raises BadData for other data."""
    if isinstance(data, PromptData | MixedData):
        return data.row
    raise BadData("the grader needs the rows of the data again, and a function of get_samples_path gives them once")


def messages_of(row: PromptRow) -> tuple[dict[str, Any], ...]:
    """The prompt as the row has it; a plain text is a message of a user."""
    return ({"role": "user", "content": row.prompt},) if isinstance(row.prompt, str) else tuple(row.prompt)


def _messages(
    row: Callable[[int], PromptRow], indices: Sequence[int], texts: Sequence[str]
) -> list[tuple[dict[str, Any], ...]]:
    """Of every sample, by the row of its prompt."""
    found: dict[int, tuple[dict[str, Any], ...]] = {}
    for index, text in zip(indices, texts, strict=True):
        if index not in found:
            asked = row(index)
            if asked.prompt_text != text:
                raise BadData(
                    f"row {index + 1} of the data is not the prompt that was answered, so that the grader cannot be "
                    "given its messages: put the data back that the run was made with"
                )
            found[index] = messages_of(asked)
    return [found[index] for index in indices]


def _segments(
    tokenizer: Any,
    response: Sequence[int],
    segments: Sequence[Mapping[str, Any]] | None,
    trajectories: Sequence[int] | None,
    rewards: Sequence[float | None] | None,
) -> tuple[ResponseSegment, ...]:
    ends = accumulate(segment["tokens"] for segment in segments or ())
    bounds = list(accumulate(trajectories or ()))
    found = []
    given = (rewards if segments else None) or [None] * len(segments or ())
    for segment, end, reward in zip(segments or (), ends, given, strict=True):
        ids = tuple(map(int, response[end - segment["tokens"] : end]))
        trajectory = bisect_left(bounds, end) if bounds else 0
        found.append(ResponseSegment(ids, tokenizer.decode(ids), segment["call"] is not None, trajectory, reward))
    return tuple(found)


def graded_again(graded: Sequence[Graded]) -> int:
    """Samples that were graded more than once."""
    return sum(g.tries > 1 for g in graded)


def grade_benchmark(
    grader: Grading, samples: Sequence[Sample], errors: Sequence[str | None], groups: Sequence[int]
) -> list[Graded]:
    """As `grade_generated`, with rewards that are scores: 0 of a wrong answer, 1 of a right one."""
    return [
        one if one.reward is None else replace(one, reward=share_of_right(one.reward, one.grader or grader.name))
        for one in grade_generated(grader, samples, errors, groups)
    ]


def grade_generated(
    grader: Grading, samples: Sequence[Sample], errors: Sequence[str | None], groups: Sequence[int]
) -> list[Graded]:
    """Grade the samples whose generation did not fail; the others keep their error. In the order of the samples. A
    grader of groups grades none of which a sample failed: such a group is dropped whole."""
    errors = list(errors)
    if grader.by_group:
        lost = {group: error for group, error in zip(groups, errors, strict=True) if error is not None}
        errors = [
            error or (f"a sample of its group failed: {lost[group]}" if group in lost else None)
            for group, error in zip(groups, errors, strict=True)
        ]
    left = [i for i, error in enumerate(errors) if error is None]
    graded = iter(grader.grade([samples[i] for i in left], [groups[i] for i in left]))
    return [next(graded) if error is None else Graded(None, error=error) for error in errors]
