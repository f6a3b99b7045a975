"""The table of the step `score`, which the first training rank writes beside the others' rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.engines.training.top_k import split_rows
from cairn.engines.types.batches import BatchReader
from cairn.engines.types.types import ModelRole, TrainBatch
from cairn.storage.ledger.commits import OutputFile, Step
from cairn.storage.ledger.schemas import SCORE
from cairn.storage.ledger.snapshots import Attempt
from cairn.storage.opening import open_store
from cairn.tasks.batch.batch import mean_of_trained, rows_column
from cairn.tasks.batch.sequences import join_by_sample
from cairn.tasks.batch.source import SnapshotReader

FILE = "scores.parquet"
_TOP = ("teacher_top_log_probs", "teacher_top_ids")
"""Columns with a row of numbers for each token."""


@dataclass(frozen=True)
class ScoreColumns:
    """Columns of a score table."""

    needed: Mapping[str, ModelRole]
    """Role of the model that computes each, by the names of `cairn.engines.training.needs.scores_needed`."""
    top_k: int = 0
    """Number of the teacher's most probable tokens."""
    vocabulary: int = 0
    """Number of tokens that policy and tokenizer know, where `top_k` is set."""

    def table(
        self,
        keys: Sequence[tuple[int, int]],
        batch: TrainBatch,
        masks: Sequence[np.ndarray],
        scores: Mapping[ModelRole, Sequence[np.ndarray]],
    ) -> tuple[pa.Table, dict[str, float]]:
        """Return the table, one row a sample in the order of the batch, and the means over the trained tokens.

        Args:
            keys: group and index of each sample.
            batch: of it only the samples of its sequences are read.
            masks: loss mask of each sample.
            scores: scores of each sequence, by role.
        """
        by_column = {column: scores[role] for column, role in self.needed.items()}
        if self.top_k:
            rows = split_rows(scores["teacher"], self.top_k, self.vocabulary)
            by_column |= {name: rows[name] for name in rows if name != "teacher_log_probs" or name in self.needed}
        names = {column: "log_probs" if column == "old_log_probs" else column for column in by_column}
        scored = {names[column]: join_by_sample(batch, values) for column, values in by_column.items()}
        columns: dict[str, Any] = dict(zip(("group_id", "sample_index"), zip(*keys, strict=True), strict=True))
        nothing: dict[str, Any] = dict.fromkeys(("log_probs", "ref_log_probs"), [None] * len(keys))
        for name, lists in {**nothing, **scored}.items():
            columns[name] = (rows_column if name in _TOP else pa.array)(lists, SCORE.field(name).type)
        schema = pa.schema([field for field in SCORE if field.name in columns])
        metrics = {name: mean_of_trained(lists, masks) for name, lists in scored.items() if name not in _TOP}
        return pa.table(columns, schema), metrics


@dataclass(frozen=True)
class ScoreFile:
    """File of a score table in the folder of an attempt, a `ScoreWriter`."""

    columns: ScoreColumns
    store_url: str
    run: str
    iteration: int
    shard: str | None
    attempt: str

    @classmethod
    def of(cls, columns: ScoreColumns, attempt: Attempt) -> "ScoreFile":
        """Return the file in an attempt's folder."""
        return cls(columns, attempt.store.url, attempt.run, attempt.iteration, attempt.shard, attempt.name)

    def write(
        self, reader: BatchReader, batch: TrainBatch, scores: Mapping[ModelRole, list[np.ndarray]]
    ) -> tuple[OutputFile, dict[str, float]]:
        """Write the file. Return it, and the means over the trained tokens."""
        assert isinstance(reader, SnapshotReader)
        table, metrics = self.columns.table(reader.keys, batch, reader.masks, scores)
        store = open_store(self.store_url)
        attempt = Attempt(store, self.run, self.iteration, Step.SCORE, self.shard, self.attempt)
        return attempt.write_table(FILE, table), metrics
