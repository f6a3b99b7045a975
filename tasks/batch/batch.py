"""Rows and columns of committed snapshots, as the steps after the rollout read them."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.engines.types.images import Image
from cairn.engines.types.types import SamplingSupport
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import IMAGES, RAW_REWARD, ROUTED, SEQUENCES, SUPPORT
from cairn.tasks.durable.recorded_run import RecordedRun
from cairn.tasks.durable.selection import GroupPlace, max_ages, removed_samples, stale_weights, trained_groups
from cairn.tasks.durable.versions import token_ages


def trained_shards(run: RecordedRun, selection: Commit) -> tuple[list[Commit], list[Commit]]:
    """Return the rollout and reward commits that hold the groups to train on, in pairs, each once.

    The list of reward commits is empty where nothing is graded. Groups from the buffer are in shards of an earlier
    iteration.
    """
    places = dict.fromkeys((iteration, shard) for iteration, shard, _ in trained_groups(run, selection))
    return (
        [run.committed(iteration, Step.ROLLOUT, shard) for iteration, shard in places],
        [run.committed(iteration, Step.REWARD, shard) for iteration, shard in places if run.config.samples_responses],
    )


def rows_of_groups(
    run: RecordedRun, selection: Commit, shards: Sequence[Commit], columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield one table per trained group, in the order of the batch, with its samples by index. An optional column is
    null where the shard lacks it."""
    wanted = ["group_id", "sample_index", *columns]
    tables = {(shard.iteration, shard.shard): with_optional(run.read(shard, wanted), wanted) for shard in shards}
    starts: dict[tuple[int, str | None], dict[int, tuple[int, int]]] = {
        place: group_slices(table) for place, table in tables.items()
    }
    for iteration, shard, group_id in trained_groups(run, selection):
        start, length = starts[iteration, shard][group_id]
        yield tables[iteration, shard].slice(start, length)


@dataclass(frozen=True)
class Selected:
    """Decisions of a filter step about the batch of an iteration."""

    iteration: int
    places: Sequence[GroupPlace]
    """Groups to train on, in the order of the batch."""
    max_ages: Mapping[int, int | None]
    """Maximum age of trainable tokens by group id; None without a bound."""
    removed: Mapping[int, frozenset[int]]
    """Indices of the samples that the sample filter took out of the loss, by group id."""
    stale: Mapping[int, Sequence[float]]
    """Weights of tokens above the maximum age (`cairn.tasks.durable.selection.stale_weights`)."""

    @classmethod
    def of(cls, run: RecordedRun, selection: Commit) -> "Selected":
        """Read the decisions of a filter step."""
        return cls(
            selection.iteration,
            trained_groups(run, selection),
            max_ages(run, selection),
            removed_samples(run, selection),
            stale_weights(run, selection),
        )

    def tokens(self, ledger: Ledger, samples: pa.Table) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the loss mask and the age of every response token of some of the samples: see `trained_tokens`."""
        lists = samples.column("weight_versions").combine_chunks()
        flat = token_ages(ledger, self.iteration, lists.values.to_numpy(zero_copy_only=False))
        ages = [flat[start:end] for start, end in itertools.pairwise(lists.offsets.to_numpy())]
        masks = []
        places = zip(samples.column("group_id").to_pylist(), samples.column("sample_index").to_pylist(), strict=True)
        for (group_id, index), mask, age in zip(places, arrays(samples, "loss_mask"), ages, strict=True):
            bound = self.max_ages[group_id]
            if bound is not None and age.max(initial=0) > bound:  # few samples have such tokens
                mask = mask * (age_weights(age, bound, self.stale.get(group_id, ())) > 0).astype(np.uint8)
            masks.append(np.zeros_like(mask) if index in self.removed.get(group_id, ()) else mask)
        return masks, ages


def trained_tokens(run: RecordedRun, selection: Commit, samples: pa.Table) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the loss mask and the age of every response token of the batch's samples, [T_i] uint8 and [T_i] int32
    each.

    A token is trained on if the rollout left it unmasked, the filter step did not remove its sample, and it is not
    older than the filter step allows for its group or has a stale weight above 0.

    Args:
        samples: `group_id`, `sample_index`, `loss_mask` and `weight_versions` of the samples in the order of the batch.
    """
    return Selected.of(run, selection).tokens(run.ledger, samples)


def mean_of_trained(fields: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> float:
    """Return the mean over the trained tokens of a batch; 0 without any. `fields`, `masks`: [T_i] of each sample."""
    trained = np.concatenate(fields)[np.concatenate(masks).astype(bool)]
    return float(trained.mean()) if trained.size else 0.0


def age_weights(ages: np.ndarray, max_age: int, stale: Sequence[float]) -> np.ndarray:
    """Return the weights of tokens by their ages [T], as [T] float32: 1 up to `max_age`, then the entries of `stale` by
    age, then 0."""
    beyond = np.asarray([*stale, 0.0], np.float32)[np.clip(ages - max_age - 1, 0, len(stale))]
    return np.where(ages <= max_age, np.float32(1), beyond)


def support_column(supports: Sequence[SamplingSupport]) -> pa.Array:
    """Return the sampling support of each sample's tokens as a column (`cairn.storage.ledger.schemas.SUPPORT`)."""
    counts = np.concatenate([np.zeros(1, np.int32), *(sample.counts for sample in supports)])
    ids = np.concatenate([np.zeros(0, np.int32), *(sample.ids for sample in supports)])
    return _nested(ids, counts, list(map(len, supports)), SUPPORT.type)


def rows_column(rows: Sequence[np.ndarray], kind: pa.DataType) -> pa.Array:
    """Return the [T_i, k] arrays of the samples as a column: a list of k numbers for each token."""
    table = np.concatenate(rows)
    return _nested(table.ravel(), np.repeat([0, table.shape[1]], [1, len(table)]), list(map(len, rows)), kind)


def rows_of(table: pa.Table, column: str) -> list[np.ndarray] | None:
    """Return the arrays of a column that `rows_column` made; None where the step did not need the column."""
    if column not in table.column_names:
        return None
    lists = table.column(column).combine_chunks()
    values = lists.values.values.to_numpy(zero_copy_only=False)
    rows = values.reshape(len(lists.values), len(values) // max(1, len(lists.values)))
    return [rows[start:end] for start, end in itertools.pairwise(lists.offsets.to_numpy())]


def _nested(values: np.ndarray, counts: np.ndarray, tokens: Sequence[int], kind: pa.DataType) -> pa.Array:
    """Return `values` as lists of lists. `counts`: 0, then the number of values per token. `tokens`: tokens per
    sample."""
    of_tokens = pa.LargeListArray.from_arrays(pa.array(np.cumsum(counts, dtype=np.int64)), pa.array(values))
    ends = np.cumsum([0, *tokens], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), of_tokens).cast(kind)


def sampling_supports(samples: pa.Table, responses: Sequence[np.ndarray]) -> list[SamplingSupport] | None:
    """Return the sampling support of each sample's tokens; the whole vocabulary for a sample whose column is null. None
    where that holds for all samples."""
    lists = samples.column(SUPPORT.name).combine_chunks()
    if lists.null_count == len(lists):
        return None
    tokens = lists.values
    ends, ids = tokens.offsets.to_numpy(), tokens.values.to_numpy(zero_copy_only=False)
    supports = []
    for (start, end), response in zip(itertools.pairwise(lists.offsets.to_numpy()), responses, strict=True):
        if start == end:
            supports.append(SamplingSupport.whole(len(response)))
        else:
            supports.append(
                SamplingSupport(ids[ends[start] : ends[end]], np.diff(ends[start : end + 1]).astype(np.int32))
            )
    return supports


def row_images(value: Sequence[Mapping[str, Any]] | None, data: Mapping[str, bytes]) -> tuple[Image, ...]:
    """Return the images of a row of the rollout table. `data`: their bytes, by SHA-256."""
    return tuple(Image(data[one["sha256"]], one["height"], one["width"]) for one in value or ())


def with_optional(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return some columns of a table. An optional column that the step did not write is null."""
    for field in (SUPPORT, *SEQUENCES, ROUTED, IMAGES, RAW_REWARD):
        if field.name in columns and field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(list(columns))


def arrays(table: pa.Table, column: str) -> list[np.ndarray]:
    """Return a list column as one numpy array per row."""
    lists = table.column(column).combine_chunks()
    values = lists.values.to_numpy(zero_copy_only=False)
    offsets = lists.offsets.to_numpy()
    return [values[start:end] for start, end in itertools.pairwise(offsets)]


def optional_arrays(table: pa.Table, column: str) -> list[np.ndarray] | None:
    """Return a list column as one numpy array per row; None where the step did not need the column."""
    if column not in table.column_names or table.column(column).null_count:
        return None
    return arrays(table, column)


def group_slices(table: pa.Table) -> dict[int, tuple[int, int]]:
    """Return group_id -> (first row, number of rows). Snapshots are sorted by group and sample."""
    ids = table.column("group_id").to_numpy()
    starts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
    lengths = np.diff(np.r_[starts, len(ids)])
    return {int(ids[start]): (int(start), int(n)) for start, n in zip(starts, lengths, strict=True)}
