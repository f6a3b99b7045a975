"""The groups that a rollout shard generates: fresh ones of the stream, and those that an earlier shard left unfinished.

A group is continued sample by sample: what had finished stays, and what had not goes on after the tokens that it has,
with the seed that it had. Its row then holds the whole response, with the weight version of every token.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from cairn.engines.types import Completion, FinishReason, GenerateRequest, KeptTokens, SamplingParams
from cairn.storage.schemas import KEPT, ROLLOUT, Status, rollout_schema
from cairn.tasks.batch import kept_column
from cairn.tasks.context import RunContext
from cairn.tasks.data import DrawnRow
from cairn.tasks.data.prompts import PromptRow


@dataclass(frozen=True)
class Group:
    """A prompt and its samples, by index."""

    drawn: DrawnRow
    seeds: tuple[int, ...]
    parts: tuple[Completion, ...] = ()
    """Where it is continued: each sample as far as it came."""

    @property
    def unfinished(self) -> list[int]:
        """The samples that have to be generated."""
        if not self.parts:
            return list(range(len(self.seeds)))
        return [index for index, part in enumerate(self.parts) if part.finish_reason == FinishReason.ABORT]

    @property
    def carried_tokens(self) -> int:
        """Response tokens that earlier shards generated."""
        return sum(len(part.response_ids) for part in self.parts)

    @property
    def input_tokens(self) -> int:
        """Tokens that an engine goes on from, over the samples that have to be generated."""
        return sum(map(self._input_length, self.unfinished))

    def given_tokens(self, completions: Sequence[Completion]) -> int:
        """Of them, those of samples that were begun."""
        pairs = zip(self.unfinished, completions, strict=True)
        return sum(self._input_length(i) for i, completion in pairs if len(completion.response_ids))

    def requests(self, params: SamplingParams) -> list[GenerateRequest]:
        """For the samples that have to be generated."""
        prompt = self.drawn.row.prompt_ids
        parts = {index: self.parts[index].response_ids for index in self.unfinished} if self.parts else {}
        return [
            GenerateRequest(
                (self.drawn.group_id, index),
                [*prompt, *parts[index].tolist()] if index in parts else prompt,
                self.seeds[index],
                params,
                len(parts.get(index, ())),
            )
            for index in self.unfinished
        ]

    def whole(self, completions: Sequence[Completion]) -> list[Completion]:
        """All samples, those that were asked for in `completions` after what was there of them."""
        error = next((completion.error for completion in completions if completion.error is not None), None)
        if error is not None:
            id = self.drawn.group_id
            return [Completion.empty((id, index), FinishReason.ERROR, error) for index in range(len(self.seeds))]
        if not self.parts:
            return list(completions)
        samples = list(self.parts)
        for i, made in zip(self.unfinished, completions, strict=True):
            samples[i] = _joined(self.parts[i], made)
        return samples

    def _input_length(self, index: int) -> int:
        return len(self.drawn.row.prompt_ids) + (len(self.parts[index].response_ids) if self.parts else 0)


def fresh_group(run: RunContext, iteration: int, drawn: DrawnRow) -> Group:
    """Of a prompt that was drawn for an iteration."""
    samples = range(run.config.rollout.n_samples_per_prompt)
    return Group(drawn, tuple(sample_seed(run.config.seed, iteration, drawn.group_id, index) for index in samples))


def unfinished_group(rows: pa.Table) -> Group:
    """Of a group's rows in the rollout table that left it unfinished, in the order of its samples."""
    samples = rows.to_pylist()
    first = samples[0]
    row = PromptRow(
        index=first["prompt_index"],
        prompt=first["prompt_text"],
        prompt_text=first["prompt_text"],
        prompt_ids=tuple(first["prompt_ids"]),
        label=first["label"],
        metadata=None if first["metadata"] is None else json.loads(first["metadata"]),
    )
    parts = tuple(
        Completion(
            request_id=(sample["group_id"], sample["sample_index"]),
            response_ids=np.asarray(sample["response_ids"], np.int32),
            log_probs=np.asarray(sample["log_probs"], np.float32),
            weight_versions=np.asarray(sample["weight_versions"], np.int32),
            finish_reason=FinishReason(sample["finish_reason"]),
            seconds=sample["seconds"],
            cached_tokens=0,
            kept=None if sample.get(KEPT.name) is None else KeptTokens.of(sample[KEPT.name]),
        )
        for sample in samples
    )
    return Group(DrawnRow(first["group_id"], first["epoch"], row), tuple(s["seed"] for s in samples), parts)


def sample_seed(run_seed: int, iteration: int, group_id: int, sample_index: int) -> int:
    """64-bit seed of one sample; every random draw of its generation comes from it."""
    words = f"{run_seed}/{iteration}/{group_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def completion_status(completion: Completion) -> Status:
    """How a generated sample ended, before it is graded."""
    if completion.error is not None:
        return Status.FAILED
    statuses = {FinishReason.LENGTH: Status.TRUNCATED, FinishReason.ABORT: Status.ABORTED}
    return statuses.get(completion.finish_reason, Status.COMPLETED)


def group_table(run: RunContext, engine: str, group: Group, samples: Sequence[Completion]) -> pa.Table:
    """The rows of a group that an engine generated, or continued. Every token may be trained on as far as the rollout
    knows; whether it is too old is seen when a batch is made of it (`cairn.tasks.batch`)."""
    row, n = group.drawn.row, len(samples)
    schema = rollout_schema(cut=run.records_kept)
    texts = run.tokenizer.batch_decode([s.response_ids.tolist() for s in samples], skip_special_tokens=True)
    columns = {
        "group_id": [group.drawn.group_id] * n,
        "sample_index": list(range(n)),
        "rollout_id": [group.drawn.group_id * run.config.rollout.n_samples_per_prompt + index for index in range(n)],
        "prompt_index": [row.index] * n,
        "epoch": [group.drawn.epoch] * n,
        "prompt_text": [row.prompt_text] * n,
        "prompt_ids": [np.asarray(row.prompt_ids, np.int32)] * n,
        "response_text": texts,
        "response_ids": [s.response_ids for s in samples],
        "log_probs": [s.log_probs for s in samples],
        "loss_mask": [np.ones(len(s.response_ids), np.uint8) for s in samples],
        "weight_versions": [s.weight_versions for s in samples],
        "finish_reason": [str(s.finish_reason) for s in samples],
        "status": [str(completion_status(s)) for s in samples],
        "error": [s.error for s in samples],
        "seed": group.seeds,
        "engine": [engine] * n,
        "seconds": [s.seconds for s in samples],
        "cached_tokens": [s.cached_tokens for s in samples],
        "label": [row.label] * n,
        "metadata": [None if row.metadata is None else json.dumps(row.metadata, sort_keys=True)] * n,
    }
    arrays = {name: pa.array(columns[name], ROLLOUT.field(name).type) for name in ROLLOUT.names}
    if KEPT.name in schema.names:
        arrays[KEPT.name] = kept_column([_kept(sample) for sample in samples])
    return pa.table(arrays, schema)


def _kept(sample: Completion) -> KeptTokens:
    return KeptTokens.whole(len(sample.response_ids)) if sample.kept is None else sample.kept


def _joined(part: Completion, rest: Completion) -> Completion:
    cut = part.kept is not None or rest.kept is not None
    return replace(
        rest,
        response_ids=np.concatenate([part.response_ids, rest.response_ids]),
        log_probs=np.concatenate([part.log_probs, rest.log_probs]),
        weight_versions=np.concatenate([part.weight_versions, rest.weight_versions]),
        seconds=part.seconds + rest.seconds,
        kept=_kept(part) + _kept(rest) if cut else None,
    )
