"""From committed snapshots to the batch that the training engine takes."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from engines.types import TrainBatch
from storage.commits import Commit, Step
from tasks.context import RunContext
from tasks.filter import trained_groups


def trained_shards(run: RunContext, selection: Commit) -> tuple[list[Commit], list[Commit]]:
    """The rollout and the reward commits that hold the groups to train on, in pairs, each once.

    Groups from the buffer lie in an earlier iteration's shards.
    """
    places = dict.fromkeys((iteration, shard) for iteration, shard, _ in trained_groups(run, selection))
    return (
        [run.committed(iteration, Step.ROLLOUT, shard) for iteration, shard in places],
        [run.committed(iteration, Step.REWARD, shard) for iteration, shard in places],
    )


def rows_of_groups(
    run: RunContext, selection: Commit, shards: Sequence[Commit], columns: Sequence[str]
) -> Iterator[pa.Table]:
    """One table a trained group, in the order of the batch, its samples by index."""
    tables = {
        (shard.iteration, shard.shard): run.read(shard, ["group_id", "sample_index", *columns]) for shard in shards
    }
    starts: dict[tuple[int, str | None], dict[int, tuple[int, int]]] = {
        place: _group_slices(table) for place, table in tables.items()
    }
    for iteration, shard, group_id in trained_groups(run, selection):
        start, length = starts[iteration, shard][group_id]
        yield tables[iteration, shard].slice(start, length)


def train_batch(
    run: RunContext,
    selection: Commit,
    rollouts: Sequence[Commit],
    advantages: Commit | None = None,
    scores: Commit | None = None,
) -> TrainBatch:
    """The batch of an iteration: trained groups in order, with advantages and scores where they are given."""
    columns = ["prompt_ids", "response_ids", "loss_mask", "log_probs"]
    samples = pa.concat_tables(rows_of_groups(run, selection, rollouts, columns)).combine_chunks()
    prompts, responses = arrays(samples, "prompt_ids"), arrays(samples, "response_ids")
    rollout_log_probs = arrays(samples, "log_probs")
    old_log_probs = rollout_log_probs if run.config.algorithm.use_rollout_logprobs else None
    ref_log_probs = values = None
    if scores is not None:
        scored = run.read(scores)
        old_log_probs = optional_arrays(scored, "log_probs") or old_log_probs
        ref_log_probs = optional_arrays(scored, "ref_log_probs")
        values = optional_arrays(scored, "values")
    estimated = None if advantages is None else run.read(advantages)
    return TrainBatch(
        input_ids=[np.concatenate(pair) for pair in zip(prompts, responses, strict=True)],
        response_lengths=[len(response) for response in responses],
        loss_mask=arrays(samples, "loss_mask"),
        advantages=None if estimated is None else arrays(estimated, "advantages"),
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        ref_log_probs=ref_log_probs,
        values=values,
        returns=None if values is None or estimated is None else arrays(estimated, "returns"),
    )


def arrays(table: pa.Table, column: str) -> list[np.ndarray]:
    """A list column as one numpy array a row."""
    lists = table.column(column).combine_chunks()
    values = lists.values.to_numpy(zero_copy_only=False)
    offsets = lists.offsets.to_numpy()
    return [values[start:end] for start, end in itertools.pairwise(offsets)]


def optional_arrays(table: pa.Table, column: str) -> list[np.ndarray] | None:
    """As `arrays`, or None where the step had no need of the column."""
    if column not in table.column_names or table.column(column).null_count:
        return None
    return arrays(table, column)


def _group_slices(table: pa.Table) -> dict[int, tuple[int, int]]:
    """group_id -> (first row, rows); snapshots are sorted by group and sample."""
    ids = table.column("group_id").to_numpy()
    starts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
    lengths = np.diff(np.r_[starts, len(ids)])
    return {int(ids[start]): (int(start), int(n)) for start, n in zip(starts, lengths, strict=True)}
