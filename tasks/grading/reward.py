"""The step `reward`: grade the samples of one shard, while other shards still generate."""

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
    TRAJECTORY_INFOS,
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
from cairn.tasks.rewards.sample import ResponseSegment, Sample, read_infos


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
    beside=True,
)
def reward(step: StepCall, rollout: Commit) -> Outcome:
    """Grade every sample of the shard.

    A sample on which the grader fails or times out is marked failed; it does not get zero. A sample that failed during
    generation is not graded, and stays failed. The samples of an unfinished group are graded once it is finished.
    """
    overlong = Overlong.of(step.run.config)
    row = prompt_rows(step.run.data) if step.run.grader.sees_messages else None
    keys = step.run.config.algorithm.gdpo_reward_keys
    samples = step.run.read(rollout, graded_columns(step.run.grader, overlong))
    shard = graded_shard(step.run.grader, step.run.tokenizer, samples, overlong, row, keys)
    graded = [one for one in shard.results if one is not None]
    return Outcome(
        tables={"rewards.parquet": shard.table},
        metrics={"failed_samples": shard.failed, "graded_again": count_regraded(graded)},
        timings={"grader_wait": max((g.waited for g in graded), default=0.0)},
    )


@dataclass(frozen=True)
class GradedShard:
    """Grades of a rollout table, in the order of its rows."""

    table: pa.Table
    """Table with the schema REWARD."""
    results: tuple[Graded | None, ...]
    """Grade of each sample; None where its group is unfinished, and nothing was graded."""

    @property
    def failed(self) -> int:
        """Number of samples of finished groups that have no reward."""
        return sum(one is not None and one.reward is None for one in self.results)


def graded_columns(grader: Grading, overlong: Overlong | None = None, tokens: bool = True) -> list[str]:
    """Return the columns of a rollout table that `graded_shard` reads, with a tokenizer (`tokens`) or without.

    `with_optional` selects them.
    """
    columns = ["group_id", "sample_index", "response_text", "label", "metadata", "status", "error", TRAJECTORIES.name]
    if grader.sees_whole_samples:
        columns += ["prompt_text", "finish_reason", TRAJECTORY_REWARDS.name, TRAJECTORY_ROLES.name]
        columns.append(TRAJECTORY_INFOS.name)
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
    """Grade the rows of a rollout table as the step does.

    Raises as `Grading.grade`, and BadData where a row of the data is not the prompt that was answered.

    Args:
        tokenizer: used only where the grader sees whole samples. None where it sees none, or where it reads no tokens
            and the special tokens contain no tags of thoughts: it then gets whole samples without tokens.
        overlong: penalty that is added to the grader's rewards.
        row: the data's rows, read only where the grader sees messages.
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
    grader_inputs = grader_samples(grader, tokenizer, samples)
    ready = iter(
        grade_generated(
            grader,
            [sample for sample, later in zip(grader_inputs, waits, strict=True) if not later],
            [error for error, later in zip(samples["error"], waits, strict=True) if not later],
            [group_id for group_id, later in zip(samples["group_id"], waits, strict=True) if not later],
        )
    )
    counts = [len(lengths or (0,)) for lengths in samples[TRAJECTORIES.name]]
    required = [key for key in reward_keys if overlong is None or key not in SHAPED]  # which shaping adds
    with_own = [
        (None, None) if later else with_own_rewards(with_rewards(next(ready), required, grader.name), count)
        for later, count in zip(waits, counts, strict=True)
    ]
    results, own = tuple(one for one, _ in with_own), [rewards for _, rewards in with_own]
    raw_rewards = [one and one.reward for one in results]
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
        table = table.append_column(RAW_REWARD, pa.array(raw_rewards, RAW_REWARD.type))
    if any(rewards is not None for rewards in own):
        table = table.append_column(TRAJECTORY_REWARDS, pa.array(own, TRAJECTORY_REWARDS.type))
    return GradedShard(table, results)


def grader_samples(grader: Grading, tokenizer: Any, columns: Mapping[str, Sequence[Any]]) -> list[Sample]:
    """Return the samples as the grader gets them. If a sample has several trajectories, the last one is the response.

    Each has `response_text`, `label` and `metadata`. For a grader of whole samples it also has `prompt_text`,
    `finish_reason` and `status`, and the rewards, roles and infos of trajectories where there are any. A tokenizer adds
    `response_ids`, `prompt_ids`, `segments`, `trajectories` and `turn_rewards`, and `messages` for a grader that sees
    them.
    """
    simple = zip(columns["response_text"], columns["label"], columns["metadata"], strict=True)
    if not grader.sees_whole_samples:
        return [Sample(text, label, metadata) for text, label, metadata in simple]
    none = [None] * len(columns["response_text"])
    returned, roles, turns, written = (
        columns.get(field.name, none)
        for field in (TRAJECTORY_REWARDS, TRAJECTORY_ROLES, TURN_REWARDS, TRAJECTORY_INFOS)
    )
    infos = list(map(read_infos, written))
    if tokenizer is None:
        return [
            Sample(
                text,
                label,
                metadata,
                prompt=columns["prompt_text"][i],
                finish_reason=columns["finish_reason"][i],
                status=columns["status"][i],
                rewards=tuple(returned[i] or ()),
                roles=tuple(roles[i] or ()),
                infos=infos[i],
            )
            for i, (text, label, metadata) in enumerate(simple)
        ]
    sees_messages = grader.sees_messages and "messages" in columns
    lengths = columns[TRAJECTORIES.name]
    responses = [
        np.asarray(last_trajectory(*one), np.int32) for one in zip(columns["response_ids"], lengths, strict=True)
    ]
    # Arrays: the tokenizer would check every number of a list before it decodes any.
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
            rewards=tuple(returned[i] or ()),
            roles=tuple(roles[i] or ()),
            infos=infos[i],
        )
        for i, (text, label, metadata) in enumerate(simple)
    ]


def prompt_rows(data: Data) -> Callable[[int], PromptRow]:
    """Return a function that reads rows of the data by index. Raises BadData for data that cannot be read twice."""
    if isinstance(data, PromptData | MixedData):
        return data.row
    raise BadData(
        "the grader must read the rows of the data again, but a function of get_samples_path returns them only once"
    )


def messages_of(row: PromptRow) -> tuple[dict[str, Any], ...]:
    """Return the prompt as messages; a plain text becomes one message of a user."""
    return ({"role": "user", "content": row.prompt},) if isinstance(row.prompt, str) else tuple(row.prompt)


def _messages(
    row: Callable[[int], PromptRow], indices: Sequence[int], texts: Sequence[str]
) -> list[tuple[dict[str, Any], ...]]:
    """Return the messages of every sample, by the row of its prompt. Raises BadData where the row has another
    prompt."""
    by_row: dict[int, tuple[dict[str, Any], ...]] = {}
    for index, text in zip(indices, texts, strict=True):
        if index not in by_row:
            data_row = row(index)
            if data_row.prompt_text != text:
                raise BadData(
                    f"row {index + 1} of the data is not the prompt of the sample, so the grader cannot "
                    "get its messages: restore the data that the run was created with"
                )
            by_row[index] = messages_of(data_row)
    return [by_row[index] for index in indices]


def _segments(
    tokenizer: Any,
    response: Sequence[int],
    segments: Sequence[Mapping[str, Any]] | None,
    trajectories: Sequence[int] | None,
    rewards: Sequence[float | None] | None,
) -> tuple[ResponseSegment, ...]:
    ends = accumulate(segment["tokens"] for segment in segments or ())
    bounds = list(accumulate(trajectories or ()))
    result = []
    own_rewards = (rewards if segments else None) or [None] * len(segments or ())
    for segment, end, reward in zip(segments or (), ends, own_rewards, strict=True):
        ids = tuple(map(int, response[end - segment["tokens"] : end]))
        trajectory = bisect_left(bounds, end) if bounds else 0
        result.append(ResponseSegment(ids, tokenizer.decode(ids), segment["call"] is not None, trajectory, reward))
    return tuple(result)


def count_regraded(graded: Sequence[Graded]) -> int:
    """Return the number of samples that were graded more than once."""
    return sum(g.tries > 1 for g in graded)


def grade_benchmark(
    grader: Grading, samples: Sequence[Sample], errors: Sequence[str | None], groups: Sequence[int]
) -> list[Graded]:
    """Grade as `grade_generated`, with rewards as scores: 0 for a wrong answer, 1 for a right one."""
    return [
        one if one.reward is None else replace(one, reward=share_of_right(one.reward, one.grader or grader.name))
        for one in grade_generated(grader, samples, errors, groups)
    ]


def grade_generated(
    grader: Grading, samples: Sequence[Sample], errors: Sequence[str | None], groups: Sequence[int]
) -> list[Graded]:
    """Grade the samples whose generation succeeded; the others keep their error. Results are in the order of the
    samples.

    A grader of groups grades no group in which a sample failed: such a group is dropped as a whole.
    """
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
