"""Groups that a rollout shard generates: fresh ones of the stream, and those that an earlier shard left unfinished.

A group is continued sample by sample. Finished samples stay, and the others resume after the tokens that they have,
with their seed. The row of a sample then has the whole response, with the weight version of every token.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.engines.types.trajectories import (
    FIRST_CALL,
    CallRecord,
    GeneratedSample,
    SampleKey,
    SampleRequest,
    Segment,
    Trajectory,
)
from cairn.engines.types.types import FinishReason, SamplingSupport
from cairn.storage.ledger.schemas import (
    IMAGE_BYTES,
    IMAGES,
    RETOKENIZED,
    ROLLOUT,
    ROUTED,
    SEQUENCES,
    SUPPORT,
    TRAJECTORIES,
    TRAJECTORY_INFOS,
    TRAJECTORY_PROMPTS,
    TRAJECTORY_REWARDS,
    TRAJECTORY_ROLES,
    TURN_REWARDS,
    Status,
    rollout_schema,
)
from cairn.storage.store.canonical import from_json
from cairn.tasks.batch.batch import row_images, support_column
from cairn.tasks.batch.sequences import last_trajectory, routed_column, routes_of
from cairn.tasks.data.prompts import PromptRow
from cairn.tasks.durable.context import RunContext
from cairn.tasks.generation.calls import read_calls
from cairn.tasks.rewards.sample import read_infos

_IMAGE = ("sha256", "height", "width")


@dataclass(frozen=True)
class Group:
    """A prompt and its samples, by index."""

    prompt: PromptRow
    seeds: tuple[int, ...]
    parts: Mapping[int, GeneratedSample] = field(default_factory=dict)
    """Samples of a continued group, each as far as it came, by index."""
    recorded: Sequence[CallRecord] = ()
    """Recorded calls of a continued group's samples."""

    def requests(self, *, finished: Collection[SampleKey]) -> list[SampleRequest]:
        """Return requests for the samples that must be generated. Those in `finished` have been."""
        left = (self._request(index) for index in range(len(self.seeds)) if not self._is_sample_finished(index))
        return [sample for sample in left if sample.key not in finished]

    def finished(self) -> list[GeneratedSample]:
        """Return the samples that earlier shards finished."""
        return [part for index, part in self.parts.items() if self._is_sample_finished(index)]

    @property
    def is_finished(self) -> bool:
        """Whether earlier shards finished all samples of the group."""
        return all(map(self._is_sample_finished, range(len(self.seeds))))

    def failed(self, error: str, own: Mapping[SampleKey, str]) -> list[GeneratedSample]:
        """Return all samples as failed, because one of them failed: each with its own error if it has one in `own`."""
        requests = map(self._request, range(len(self.seeds)))
        return [GeneratedSample.failed(request, own.get(request.key, error)) for request in requests]

    def carried_tokens(self, index: int | None = None) -> int:
        """Return the number of response tokens that earlier shards generated, for one sample or for all."""
        parts = [part for i, part in self.parts.items() if index in (None, i)]
        return sum(len(part.trajectory.response_ids) for part in parts)

    def _is_sample_finished(self, index: int) -> bool:
        return index in self.parts and self.parts[index].finish_reason != FinishReason.ABORT

    def _request(self, index: int) -> SampleRequest:
        row, part = self.prompt, self.parts.get(index)
        return SampleRequest(
            row.group_id,
            index,
            row.prompt_ids,
            self.seeds[index],
            begun=part.trajectory.segments[0] if part is not None and part.trajectory.segments else None,
            prompt=row.prompt_text,
            label=row.label,
            metadata=row.metadata or {},
            images=row.images,
            recorded=tuple(record for record in self.recorded if record.index == index),
        )


def fresh_group(run: RunContext, iteration: int, prompt: PromptRow) -> Group:
    """Return the group of a prompt that was drawn for an iteration."""
    samples = range(run.config.rollout.n_samples_per_prompt)
    return Group(prompt, tuple(sample_seed(run.config.seed, iteration, prompt.group_id, index) for index in samples))


def unfinished_group(
    rows: pa.Table, images: Mapping[str, bytes], calls: tuple[pa.Table, pa.Table | None] | None = None
) -> Group:
    """Return the group in the rows of the rollout table that left it unfinished, in the order of its samples.

    Args:
        images: those of that rollout, by SHA-256.
        calls: recorded calls of its samples, as `RunContext.calls` returns them.
    """
    samples = rows.to_pylist()
    first = samples[0]
    row = PromptRow(
        index=first["prompt_index"],
        prompt=first["prompt_text"],
        prompt_text=first["prompt_text"],
        prompt_ids=tuple(first["prompt_ids"]),
        label=first["label"],
        metadata=None if first["metadata"] is None else from_json(first["metadata"]),
        images=row_images(first.get(IMAGES.name), images),
        group_id=first["group_id"],
        epoch=first["epoch"],
    )
    parts = sample_parts(samples)
    recorded: Sequence[CallRecord] = ()
    if calls is not None:
        own = calls[0].filter(pc.field("group_id") == first["group_id"])
        recorded = read_calls(own, calls[1], {part.key: part.trajectory.segments for part in parts.values()})
    return Group(row, tuple(s["seed"] for s in samples), parts, recorded)


def sample_parts(samples: Sequence[Mapping[str, Any]]) -> dict[int, GeneratedSample]:
    """Return the samples in a group's rows of the rollout table, each as far as it came, by index."""
    return {
        sample["sample_index"]: GeneratedSample(
            sample["group_id"],
            sample["sample_index"],
            Trajectory(tuple(row_segments(sample))),
            FinishReason(sample["finish_reason"]),
            lengths=None if sample.get(TRAJECTORIES.name) is None else tuple(sample[TRAJECTORIES.name]),
            prompts=_own_prompts(sample.get(TRAJECTORY_PROMPTS.name)),
            rewards=_optional_tuple(sample.get(TRAJECTORY_REWARDS.name)),
            roles=_optional_tuple(sample.get(TRAJECTORY_ROLES.name)),
            error=sample["error"],
            retold=sample.get(RETOKENIZED.name) or 0,
            infos=read_infos(sample.get(TRAJECTORY_INFOS.name)) or None,
        )
        for sample in samples
    }


def _own_prompts(value: Sequence[Sequence[int] | None] | None) -> tuple[np.ndarray | None, ...] | None:
    if value is None:
        return None
    return tuple(None if prompt is None else np.asarray(prompt, np.int32) for prompt in value)


def _optional_tuple(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def row_segments(row: Mapping[str, Any]) -> list[Segment]:
    """Return the segments of a row of the rollout table."""
    tokens = len(row["response_ids"])
    segments = row.get("segments")
    if segments is None:
        reason = FinishReason(row["finish_reason"])
        segments = [{"tokens": tokens, "call": FIRST_CALL, "seed": row["seed"], "finish_reason": reason}] * bool(tokens)
    support = None if row.get(SUPPORT.name) is None else SamplingSupport.of(row[SUPPORT.name])
    routes, prompt = routes_of(row.get(ROUTED.name)), len(row["prompt_ids"])
    rewards = row.get(TURN_REWARDS.name) or [None] * len(segments)
    result, start = [], 0
    for i, segment in enumerate(segments):
        span = slice(start, start + segment["tokens"])
        ids, mask = np.asarray(row["response_ids"][span], np.int32), np.asarray(row["loss_mask"][span], np.uint8)
        start = span.stop
        if segment["call"] is None:
            result.append(Segment(ids, mask))
            continue
        result.append(
            Segment(
                ids,
                mask,
                segment["call"],
                np.asarray(row["log_probs"][span], np.float32),
                np.asarray(row["weight_versions"][span], np.int32),
                segment["seed"],
                FinishReason(segment["finish_reason"]),
                None if support is None else support.at(np.arange(span.start, span.stop)),
                None if routes is None else routes[: prompt + span.stop - 1],
                row["seconds"] if i == 0 else 0.0,
                reward=rewards[i],
            )
        )
    return result


def sample_seed(run_seed: int, iteration: int, group_id: int, sample_index: int) -> int:
    """Return the 64-bit seed of one sample. Every random draw of its generation derives from it."""
    words = f"{run_seed}/{iteration}/{group_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def status_of(finish_reason: str) -> Status:
    """Return the status of a generated sample before it is graded."""
    statuses = {
        FinishReason.LENGTH: Status.TRUNCATED,
        FinishReason.ABORT: Status.ABORTED,
        FinishReason.ERROR: Status.FAILED,
    }
    return statuses.get(FinishReason(finish_reason), Status.COMPLETED)


def segments_value(sample: GeneratedSample) -> list[dict[str, Any]] | None:
    """Return the value of the column `segments`; None for a sample that consists of its first call's segment."""
    segments = sample.trajectory.segments
    if [(segment.call, segment.finish_reason) for segment in segments] in ([], [(FIRST_CALL, sample.finish_reason)]):
        return None
    return [
        {
            "tokens": len(segment),
            "call": segment.call,
            "seed": segment.seed,
            "finish_reason": None if segment.finish_reason is None else str(segment.finish_reason),
        }
        for segment in segments
    ]


@dataclass(frozen=True)
class RowFormat:
    """What a run's rows of the rollout table depend on, besides the samples."""

    group_size: int
    """`rollout.n_samples_per_prompt`."""
    cut: bool
    """Whether the sampling support of each token is recorded."""
    several: bool
    """Whether samples may have several trajectories, rewards and roles."""
    routed: bool
    """Whether the experts of each token are recorded."""
    images: bool
    """Whether prompts may have images."""

    @classmethod
    def of(cls, run: RunContext) -> "RowFormat":
        """Return the format of a run's rows."""
        config = run.config
        return cls(
            config.rollout.n_samples_per_prompt,
            run.records_support,
            config.rollout.custom_generate_function_path != "single_turn",
            config.algorithm.use_rollout_routing_replay,
            config.data.has_images,
        )

    def schema(self, groups: Mapping[int, Group]) -> pa.Schema:
        """Return the schema of `sample_table`. Continued groups may have begun with what the run no longer has."""
        parts = [part for group in groups.values() for part in group.parts.values()]
        begun = any(part.lengths or part.rewards or part.roles or part.infos for part in parts)
        images = self.images or any(group.prompt.images for group in groups.values())
        return rollout_schema(cut=self.cut, several=begun or self.several, routed=self.routed, images=images)


def without_unused(samples: pa.Table) -> pa.Table:
    """Return rows of the rollout table in their committed form, without columns of trajectories that are all null."""
    present = [field.name for field in SEQUENCES if field.name in samples.column_names]
    return samples.drop_columns([name for name in present if samples.column(name).null_count == samples.num_rows])


def sample_table(
    format: RowFormat,
    tokenizer: Any,
    engine: str | Sequence[str],
    groups: Mapping[int, Group],
    samples: Sequence[GeneratedSample],
) -> pa.Table:
    """Return rows for samples that an engine generated or continued. `engine`: one name for all, or one for each.

    The loss mask allows every token that the policy sampled. Tokens that are too old are masked when a batch is made
    (`cairn.tasks.batch.batch`).
    """
    n, schema = format.group_size, format.schema(groups)
    rows = [groups[sample.group_id].prompt for sample in samples]
    drawn = {row.group_id: row for row in rows}
    prompts = {id: np.asarray(row.prompt_ids, np.int32) for id, row in drawn.items()}
    metadata = {
        id: None if row.metadata is None else json.dumps(row.metadata, sort_keys=True) for id, row in drawn.items()
    }
    trajectories = [sample.trajectory for sample in samples]
    responses = [trajectory.response_ids for trajectory in trajectories]
    columns = {
        "group_id": [s.group_id for s in samples],
        "sample_index": [s.index for s in samples],
        "rollout_id": [s.group_id * n + s.index for s in samples],
        "prompt_index": [row.index for row in rows],
        "epoch": [row.epoch for row in rows],
        "prompt_text": [row.prompt_text for row in rows],
        "prompt_ids": [prompts[s.group_id] for s in samples],
        "response_text": tokenizer.batch_decode(
            # Arrays: the tokenizer would check every number of a list before it decodes any.
            [last_trajectory(ids, sample.lengths) for ids, sample in zip(responses, samples, strict=True)],
            skip_special_tokens=True,
        ),
        "response_ids": responses,
        "segments": [segments_value(s) for s in samples],
        "log_probs": [trajectory.log_probs for trajectory in trajectories],
        "loss_mask": [trajectory.loss_mask for trajectory in trajectories],
        "weight_versions": [trajectory.weight_versions for trajectory in trajectories],
        "finish_reason": [str(s.finish_reason) for s in samples],
        "status": [str(status_of(s.finish_reason)) for s in samples],
        "error": [s.error for s in samples],
        "seed": [groups[s.group_id].seeds[s.index] for s in samples],
        "engine": [engine] * len(samples) if isinstance(engine, str) else engine,
        "seconds": [trajectory.seconds for trajectory in trajectories],
        "cached_tokens": [trajectory.cached_tokens for trajectory in trajectories],
        "label": [row.label for row in rows],
        "metadata": [metadata[s.group_id] for s in samples],
    }
    arrays = {name: pa.array(columns[name], ROLLOUT.field(name).type) for name in ROLLOUT.names}
    if SUPPORT.name in schema.names:
        arrays[SUPPORT.name] = support_column([trajectory.kept for trajectory in trajectories])
    if ROUTED.name in schema.names:
        lengths = [len(row.prompt_ids) for row in rows]
        arrays[ROUTED.name] = routed_column(
            [
                [
                    one.routed_experts(prompt if one.prompt_ids is None else len(one.prompt_ids))
                    for one in sample.trajectories
                ]
                for sample, prompt in zip(samples, lengths, strict=True)
            ]
        )
    if TRAJECTORIES.name in schema.names:
        arrays |= trajectory_columns(samples)
    if IMAGES.name in schema.names:
        arrays[IMAGES.name] = images_column(rows)
    return pa.table(arrays, schema)


def images_column(rows: Sequence[PromptRow]) -> pa.Array:
    """Return the images of some prompts as a column of type `cairn.storage.ledger.schemas.IMAGES`."""
    values = [[dict(zip(_IMAGE, image.key, strict=True)) for image in row.images] or None for row in rows]
    return pa.array(values, IMAGES.type)


def image_table(groups: Iterable[Group]) -> pa.Table | None:
    """Return the bytes of the images of some groups' prompts, each once; None without images."""
    images = {image.sha256: image.data for group in groups for image in group.prompt.images}
    columns = zip(*sorted(images.items()), strict=True)
    return pa.table(dict(zip(IMAGE_BYTES.names, columns, strict=True)), IMAGE_BYTES) if images else None


def trajectory_columns(samples: Sequence[GeneratedSample]) -> dict[str, pa.Array]:
    """Return the columns `cairn.storage.ledger.schemas.SEQUENCES`, which describe the trajectories of each sample."""
    return {
        TRAJECTORIES.name: pa.array([sample.lengths for sample in samples], TRAJECTORIES.type),
        TRAJECTORY_PROMPTS.name: pa.array([sample.prompts for sample in samples], TRAJECTORY_PROMPTS.type),
        TRAJECTORY_REWARDS.name: pa.array([sample.rewards for sample in samples], TRAJECTORY_REWARDS.type),
        TRAJECTORY_ROLES.name: pa.array([sample.roles for sample in samples], TRAJECTORY_ROLES.type),
        TURN_REWARDS.name: pa.array([_turn_rewards(sample) for sample in samples], TURN_REWARDS.type),
        RETOKENIZED.name: pa.array([sample.retold or None for sample in samples], RETOKENIZED.type),
        TRAJECTORY_INFOS.name: pa.array([_infos(sample) for sample in samples], TRAJECTORY_INFOS.type),
    }


def _infos(sample: GeneratedSample) -> list[str | None] | None:
    if sample.infos is None:
        return None
    return [None if info is None else json.dumps(info, sort_keys=True) for info in sample.infos]


def _turn_rewards(sample: GeneratedSample) -> list[float | None] | None:
    rewards = [segment.reward for segment in sample.trajectory.segments]
    return None if all(reward is None for reward in rewards) else rewards


def finished_samples(table: pa.Table) -> tuple[set[SampleKey], dict[int, str]]:
    """Return the finished samples in rows of the rollout table, and the first error of each group with a failed
    sample."""
    names = ("group_id", "sample_index", "error")
    rows = list(zip(*(table.column(name).to_pylist() for name in names), strict=True))
    errors: dict[int, str] = {}
    for group_id, _, error in sorted(rows, key=lambda row: row[:2]):
        if error is not None:
            errors.setdefault(group_id, error)
    return {(group_id, index) for group_id, index, _ in rows}, errors
