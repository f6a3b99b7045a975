"""The batch of an iteration as the training ranks read it from its snapshots: `cairn.engines.types.batches`.

Its parts are the tables of the shards that hold its groups, then those of the steps `advantage` and `score`. The driver
sends the names and digests of these files, and the filter step's decisions. So neither its memory nor what it sends
grows with the tokens of a batch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.engines.training.needs import loss_needs
from cairn.engines.types.batches import BatchOutline
from cairn.engines.types.images import Image
from cairn.engines.types.types import SamplingSupport, TrainBatch
from cairn.storage.ledger.commits import Commit, OutputFile
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import IMAGES, ROUTED, SEQUENCES, SUPPORT, TRAJECTORIES, TRAJECTORY_PROMPTS
from cairn.storage.ledger.snapshots import CheckedTable, read_recorded_table
from cairn.storage.opening import open_store
from cairn.tasks.batch.batch import (
    Selected,
    arrays,
    group_slices,
    optional_arrays,
    row_images,
    rows_of,
    sampling_supports,
    with_optional,
)
from cairn.tasks.batch.sequences import own_prompts, routed_experts, split_trajectories
from cairn.tasks.durable.recorded_run import RecordedRun

_SIZES = ("group_id", "sample_index", "prompt_ids", "loss_mask", "weight_versions", TRAJECTORIES.name)
"""Columns of a rollout that the outline of a batch needs, besides the prompts of trajectories."""
_ROWS = (
    *("group_id", "sample_index", "prompt_ids", "response_ids", "loss_mask", "log_probs", "weight_versions"),
    *(field.name for field in (SUPPORT, *SEQUENCES, IMAGES)),
)
"""Columns of a rollout that its rows need, besides the routed experts."""
_ADVANTAGES = ("advantages", "returns")
_SCORES = (
    *("log_probs", "ref_log_probs", "teacher_log_probs", "teacher_top_log_probs", "teacher_top_ids"),
    "values",
)


@dataclass(frozen=True)
class Snapshot:
    """A committed table."""

    run: str
    table: OutputFile
    images: OutputFile | None = None

    @classmethod
    def of(cls, commit: Commit) -> "Snapshot":
        """Return the table of a commit, with its images."""
        return cls(commit.run, commit.table, commit.images)


@dataclass(frozen=True)
class SnapshotBatch:
    """The batch of an iteration, a `BatchSource`."""

    store_url: str
    run: str
    run_id: str | None
    selected: Selected
    rollouts: Mapping[tuple[int, str | None], Snapshot]
    """By iteration and shard."""
    advantages: Snapshot | None
    scores: Snapshot | None
    replays: bool
    """Whether the routed experts are read."""
    rollout_is_old: bool
    """Whether the rollout engine's log-probs are those of the old policy."""
    samples: bool
    """Whether a rollout engine sampled the responses."""
    reads_returns: bool
    masks: bool = False
    """Whether the first rank gets the loss masks of all samples."""

    def reader(self) -> "SnapshotReader":
        """Begin to read the batch, in any process."""
        return SnapshotReader(self, _ledger(self.store_url, self.run, self.run_id))


def snapshot_batch(
    run: RecordedRun,
    selection: Commit,
    rollouts: Sequence[Commit],
    advantages: Commit | None = None,
    scores: Commit | None = None,
    *,
    masks: bool = False,
) -> SnapshotBatch:
    """Return the batch of an iteration: trained groups in order, with advantages and scores if passed. A sample with
    several trajectories becomes as many sequences. `masks`: see `SnapshotBatch`."""
    algorithm = run.config.algorithm
    return SnapshotBatch(
        run.ledger.store.url,
        run.ledger.run,
        run.ledger.manifest.identity,
        Selected.of(run, selection),
        {(rollout.iteration, rollout.shard): Snapshot.of(rollout) for rollout in rollouts},
        None if advantages is None else Snapshot.of(advantages),
        None if scores is None else Snapshot.of(scores),
        replays=algorithm.use_rollout_routing_replay,
        rollout_is_old=algorithm.use_rollout_logprobs,
        samples=run.config.samples_responses,
        reads_returns=advantages is not None and "returns" in loss_needs(algorithm),
        masks=masks,
    )


def train_batch(
    run: RecordedRun,
    selection: Commit,
    rollouts: Sequence[Commit],
    advantages: Commit | None = None,
    scores: Commit | None = None,
) -> TrainBatch:
    """Return the same batch with all of its rows."""
    return SnapshotReader(snapshot_batch(run, selection, rollouts, advantages, scores), run.ledger).whole()


@lru_cache(maxsize=2)  # a rank reads the batches of one run; its manifest and its parents never change
def _ledger(store_url: str, run: str, run_id: str | None) -> Ledger:
    return Ledger.open(open_store(store_url), run)


@dataclass(frozen=True)
class _Sample:
    """Sizes of a sample."""

    index: int
    """Position in its group."""
    prompt: int
    """Tokens of its prompt."""
    lengths: Sequence[int]
    """Response tokens of its trajectories."""
    prompts: Sequence[int | None]
    """Tokens of the own prompt of each trajectory; None where it follows the sample's."""
    trained: Sequence[int]
    """Trained tokens of each trajectory."""
    divisors: Sequence[int]
    several: bool
    """Whether its trajectories are recorded."""


@dataclass(frozen=True)
class _Rows:
    """Rows of a part that a rank gets, and what every rank gets of it."""

    kind: str
    """Step that wrote the table."""
    samples: Sequence[int]
    """Index in the batch of the sample of each row."""
    table: pa.Table
    supported: bool = False
    """Whether a sample of the part has a sampling support."""
    images: Mapping[str, bytes] | None = None
    """Images of the rows by SHA-256; None where no sample of the part has any."""
    routes: Mapping[int, int] | None = None
    """Number of expert choices for a token of each sample of the part; None where none is recorded."""
    masks: Mapping[int, np.ndarray] | None = None


class SnapshotReader:
    """A rank's reading of a batch, a `BatchReader`."""

    def __init__(self, batch: SnapshotBatch, ledger: Ledger) -> None:
        self._batch, self._ledger = batch, ledger
        places = batch.selected.places
        self._shards = list(dict.fromkeys((iteration, shard) for iteration, shard, _ in places))
        self._places = {place: number for number, place in enumerate(places)}
        self._whole = [
            (kind, snapshot)
            for kind, snapshot in (("advantage", batch.advantages), ("score", batch.scores))
            if snapshot is not None
        ]
        self._tables: dict[int, CheckedTable] = {}
        """Parts that this rank has read but not passed on."""
        self._rows_of: dict[int, tuple[list[int], np.ndarray]] = {}
        """For each part of a shard that this rank reads, its trained groups by their places in the batch, and the
        indices of their rows."""
        self._masks: dict[int, np.ndarray] = {}
        self._wanted: list[frozenset[int]] | None = None

    @property
    def parts(self) -> int:
        """Number of tables."""
        return len(self._shards) + len(self._whole)

    def sizes(self, part: int) -> dict[int, list[_Sample]]:
        """Return the sizes of the samples of each trained group in a part, by the group's place in the batch."""
        if part >= len(self._shards):
            self._tables[part] = self._read(self._whole[part - len(self._shards)][1])
            return {}
        iteration, shard = self._shards[part]
        self._tables[part] = self._read(self._batch.rollouts[iteration, shard])
        columns = (*_SIZES, TRAJECTORY_PROMPTS.name)
        table = with_optional(self._tables[part].read(columns), columns)
        slices = group_slices(table)
        places = [
            (self._places[iteration, shard, group_id], group_id)
            for at, name, group_id in self._batch.selected.places
            if (at, name) == (iteration, shard)
        ]
        rows = np.concatenate([np.arange(start, start + count) for start, count in (slices[id] for _, id in places)])
        self._rows_of[part] = [place for place, _ in places], rows
        samples = iter(self._sample_sizes(_taken(table, rows)))
        return {place: [next(samples) for _ in range(slices[id][1])] for place, id in places}

    def outline(self, sizes: Sequence[Mapping[int, Sequence[_Sample]]]) -> BatchOutline:
        """Return the outline of the batch."""
        by_place = {place: samples for part in sizes for place, samples in part.items()}
        groups = [by_place[place] for place in range(len(by_place))]
        ids = [group_id for _, _, group_id in self._batch.selected.places]
        self._first = [0, *np.cumsum([len(group) for group in groups]).tolist()]
        samples = [sample for group in groups for sample in group]
        self.keys = [(id, sample.index) for id, group in zip(ids, groups, strict=True) for sample in group]
        """Group and index of each sample of the batch."""
        several = any(sample.several for sample in samples)
        self._sample_of = [number for number, sample in enumerate(samples) for _ in sample.lengths]
        self._outline = BatchOutline(
            tokens=[
                (sample.prompt if own is None else own) + length
                for sample in samples
                for own, length in zip(sample.prompts, sample.lengths, strict=True)
            ],
            response_lengths=[length for sample in samples for length in sample.lengths],
            trained=[count for sample in samples for count in sample.trained],
            divisors=[count for sample in samples for count in sample.divisors],
            samples=self._sample_of if several else None,
        )
        return self._outline

    def rows(self, part: int, wanted: Sequence[Collection[int]]) -> list[_Rows]:
        """Return the rows of a part that each rank gets."""
        if self._wanted is None:
            self._wanted = [frozenset(self._sample_of[sequence] for sequence in own) for own in wanted]
        file = self._tables.pop(part)
        made: dict[frozenset[int], _Rows] = {}  # ranks that share their sequences get the same
        if part >= len(self._shards):
            kind, _ = self._whole[part - len(self._shards)]
            table = file.read(_ADVANTAGES if kind == "advantage" else _SCORES)
            for own in set(self._wanted):
                made[own] = _Rows(kind, sorted(own), _taken(table, sorted(own)))
            return [made[own] for own in self._wanted]
        places, indices = self._rows_of.pop(part)
        numbers = [number for place in places for number in range(self._first[place], self._first[place + 1])]
        columns = (*_ROWS, ROUTED.name) if self._batch.replays else _ROWS
        table = _taken(with_optional(file.read(columns), columns), indices)
        images = self._images(part, table)
        shared = _Rows(
            "rollout",
            numbers,
            table,
            supported=table.column(SUPPORT.name).null_count < table.num_rows,
            images=images,
            routes=_routes(numbers, table) if self._batch.replays else None,
        )
        for own in set(self._wanted):
            chosen = [row for row, number in enumerate(numbers) if number in own]
            rows = _taken(table, chosen)
            made[own] = replace(shared, samples=[numbers[row] for row in chosen], table=rows)
            if images:
                named = {one["sha256"] for row in rows.column(IMAGES.name).to_pylist() for one in row or ()}
                made[own] = replace(made[own], images={sha256: images[sha256] for sha256 in named})
        result = [made[own] for own in self._wanted]
        if self._batch.masks:
            masks, _ = self._batch.selected.tokens(self._ledger, table)
            result[0] = replace(result[0], masks=dict(zip(numbers, masks, strict=True)))
        return result

    def batch(self, rows: Sequence[_Rows], own: Collection[int]) -> TrainBatch:
        """Return the batch from the rows of all parts."""
        for one in rows:
            self._masks.update(one.masks or {})
        shards = [one for one in rows if one.kind == "rollout"]
        numbers, samples = _joined(shards)
        rest = {one.kind: one.table for one in rows if one.kind != "rollout"}
        held = self._held(samples, rest.get("advantage"), rest.get("score"), shards)
        outline = self._outline
        choices = None
        if held.routed_experts is not None:
            per_token = {number: count for one in shards for number, count in (one.routes or {}).items()}
            choices = [
                (tokens - 1) * per_token.get(sample, 0)
                for sample, tokens in zip(self._sample_of, outline.tokens, strict=True)
            ]
        count = len(outline)
        chosen = set(numbers)
        places = [sequence for sequence, sample in enumerate(self._sample_of) if sample in chosen]
        if len(places) == count:
            return held

        def spread(values: list[Any] | None) -> Any:
            if values is None:
                return None
            whole: list[Any] = [None] * count
            for place, value in zip(places, values, strict=True):
                whole[place] = value
            return whole

        lists = {name: spread(value) for name, value in vars(held).items() if isinstance(value, list)}
        groups = [self.keys[sample][0] for sample in self._sample_of]
        return replace(
            held,
            **lists | {"groups": groups, "response_lengths": outline.response_lengths, "samples": outline.samples},
            routed_choices=choices,
        )

    def whole(self) -> TrainBatch:
        """Return the whole batch."""
        outline = self.outline([self.sizes(part) for part in range(self.parts)])
        own = range(len(outline))
        return self.batch([self.rows(part, [own])[0] for part in range(self.parts)], own)

    @property
    def masks(self) -> list[np.ndarray]:
        """Loss masks of all samples, on the first rank."""
        return [self._masks[number] for number in range(len(self.keys))]

    def _held(
        self, samples: pa.Table, estimated: pa.Table | None, scored: pa.Table | None, shards: Sequence[_Rows]
    ) -> TrainBatch:
        """Return the batch of some samples."""
        prompts, responses = arrays(samples, "prompt_ids"), arrays(samples, "response_ids")
        loss_mask, _ = self._batch.selected.tokens(self._ledger, samples)
        divisor_mask = arrays(samples, "loss_mask")
        rollout_log_probs = arrays(samples, "log_probs")
        old_log_probs = rollout_log_probs if self._batch.rollout_is_old else None
        ref_log_probs = teacher_log_probs = top_log_probs = top_ids = values = None
        if scored is not None:
            old_log_probs = optional_arrays(scored, "log_probs") or old_log_probs
            ref_log_probs = optional_arrays(scored, "ref_log_probs")
            teacher_log_probs = optional_arrays(scored, "teacher_log_probs")
            top_log_probs, top_ids = (rows_of(scored, name) for name in ("teacher_top_log_probs", "teacher_top_ids"))
            values = optional_arrays(scored, "values")
        images = [one.images for one in shards if one.images is not None]
        data = {sha256: content for part in images for sha256, content in part.items()}
        batch = TrainBatch(
            input_ids=[np.concatenate(pair) for pair in zip(prompts, responses, strict=True)],
            response_lengths=[len(response) for response in responses],
            loss_mask=loss_mask,
            divisor_mask=None if all(map(np.array_equal, loss_mask, divisor_mask)) else divisor_mask,
            advantages=None if estimated is None else arrays(estimated, "advantages"),
            old_log_probs=old_log_probs,
            rollout_log_probs=rollout_log_probs if self._batch.samples else None,
            ref_log_probs=ref_log_probs,
            teacher_log_probs=teacher_log_probs,
            teacher_top_log_probs=top_log_probs,
            teacher_top_ids=top_ids,
            values=values,
            returns=arrays(estimated, "returns") if estimated is not None and self._batch.reads_returns else None,
            groups=samples.column("group_id").to_pylist(),
            kept=_supports(samples, responses) if any(one.supported for one in shards) else None,
            routed_experts=routed_experts(samples) if any(one.routes for one in shards) else None,
            images=_images_of(samples, data) if images else None,
        )
        if self._outline.samples is None:
            return batch
        return split_trajectories(batch, samples.column(TRAJECTORIES.name).to_pylist(), own_prompts(samples))

    def _sample_sizes(self, table: pa.Table) -> list[_Sample]:
        """Return the sizes of the samples of a rollout table."""
        masks, _ = self._batch.selected.tokens(self._ledger, table)
        sizes = []
        for index, prompt, trained, divisors, lengths, prompts in zip(
            table.column("sample_index").to_pylist(),
            pc.list_value_length(table.column("prompt_ids")).to_pylist(),
            masks,
            arrays(table, "loss_mask"),
            table.column(TRAJECTORIES.name).to_pylist(),
            own_prompts(table),
            strict=True,
        ):
            own = lengths or [len(trained)]
            cuts = np.cumsum(own)[:-1]
            sizes.append(
                _Sample(
                    index,
                    prompt,
                    own,
                    [None if one is None else len(one) for one in prompts or [None] * len(own)],
                    [int(part.sum()) for part in np.split(trained, cuts)],
                    [int(part.sum()) for part in np.split(divisors, cuts)],
                    lengths is not None,
                )
            )
        return sizes

    def _read(self, snapshot: Snapshot) -> CheckedTable:
        return CheckedTable(self._ledger.store, snapshot.run, snapshot.table)

    def _images(self, part: int, table: pa.Table) -> dict[str, bytes] | None:
        """Return the images of a shard by their SHA-256; None where no row has any."""
        if table.column(IMAGES.name).null_count == table.num_rows:
            return None
        snapshot = self._batch.rollouts[self._shards[part]]
        assert snapshot.images is not None
        images = read_recorded_table(self._ledger.store, snapshot.run, snapshot.images)
        return dict(zip(*(images.column(name).to_pylist() for name in ("sha256", "data")), strict=True))


def _taken(table: pa.Table, rows: Sequence[int] | np.ndarray) -> pa.Table:
    """Return some rows of a table, without a copy where these are all in their order."""
    indices = np.asarray(rows, np.int64)
    return table if np.array_equal(indices, np.arange(table.num_rows)) else table.take(pa.array(indices))


def _joined(shards: Sequence[_Rows]) -> tuple[list[int], pa.Table]:
    """Return the samples of the rows of several shards, in the order of the batch, and their table."""
    numbers = np.concatenate([np.asarray(one.samples, np.int64) for one in shards])
    table = pa.concat_tables([one.table for one in shards]).combine_chunks()
    order = np.argsort(numbers)
    return numbers[order].tolist(), table if (np.diff(order) == 1).all() else table.take(order)


def _routes(numbers: Sequence[int], table: pa.Table) -> dict[int, int] | None:
    column = table.column(ROUTED.name).combine_chunks()
    if column.null_count == len(column):
        return None
    layers, top_k = (column.field(name).to_numpy(zero_copy_only=False) for name in ("layers", "top_k"))
    choices = layers.astype(np.float64) * top_k
    known = column.is_valid().to_numpy(zero_copy_only=False)
    return {number: int(count) for number, count, here in zip(numbers, choices, known, strict=True) if here}


def _supports(samples: pa.Table, responses: Sequence[np.ndarray]) -> list[SamplingSupport]:
    """Return the supports of some samples of a batch of which others have a support."""
    supports = sampling_supports(samples, responses)
    return [SamplingSupport.whole(len(response)) for response in responses] if supports is None else supports


def _images_of(samples: pa.Table, data: Mapping[str, bytes]) -> list[tuple[Image, ...]]:
    return [row_images(own, data) for own in samples.column(IMAGES.name).to_pylist()]
