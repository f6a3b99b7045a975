"""Batches that lie in storage, and of which each training rank reads its own rows.

    outline     sizes of all sequences; equal on every rank, which all divide the batch by it in the same way
    rows        all that a rank reads of its own sequences

A batch has several parts, such as files. Each rank reads some of them, checks them, and sends the others their rows.
So each file is read once, whatever the number of ranks; a process holds its own rows, and decodes one part at a time.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from cairn.engines.types.types import ModelRole, TrainBatch


@dataclass(frozen=True)
class BatchOutline:
    """Sizes of all N sequences of a batch, which are its samples or their trajectories (`TrainBatch.samples`)."""

    tokens: list[int]
    """Number of tokens P_i + R_i."""
    response_lengths: list[int]
    """Number of response tokens R_i."""
    trained: list[int]
    """Number of tokens in `TrainBatch.loss_mask`."""
    divisors: list[int]
    """Number of tokens in `TrainBatch.divisor_mask`, or without it in `TrainBatch.loss_mask`."""
    samples: list[int] | None = None
    """`TrainBatch.samples`."""

    @classmethod
    def of(cls, batch: TrainBatch) -> "BatchOutline":
        """Return the outline of a batch that this process holds as a whole."""
        trained = [int(mask.sum()) for mask in batch.loss_mask]
        divisors = trained if batch.divisor_mask is None else [int(mask.sum()) for mask in batch.divisor_mask]
        tokens = [len(ids) for ids in batch.input_ids]
        return cls(tokens, list(batch.response_lengths), trained, divisors, batch.samples)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sample_of(self) -> Sequence[int]:
        """Index of the sample of each sequence, from 0."""
        return range(len(self)) if self.samples is None else self.samples


class BatchReader(Protocol):
    """A batch that one rank reads, in the order of these methods. Arguments and results named `Any` go from rank to
    rank by pickle. Methods raise Damaged and the store's errors."""

    @property
    def parts(self) -> int:
        """Number of parts, the same on all ranks."""

    def sizes(self, part: int) -> Any:
        """Return what the outline needs of a part."""

    def outline(self, sizes: Sequence[Any]) -> BatchOutline:
        """Return the outline. `sizes`: of all parts, in order."""

    def rows(self, part: int, wanted: Sequence[Collection[int]]) -> list[Any]:
        """Return the rows of a part that each rank gets, and what all ranks get of it. The part's sizes were read here.

        Args:
            wanted: for each rank, the sequences whose rows it gets.
        """

    def batch(self, rows: Sequence[Any], own: Collection[int]) -> TrainBatch:
        """Return the batch from the rows of all parts that this rank got. Sequences other than its own have lengths,
        and None in all other fields."""


@runtime_checkable
class BatchSource(Protocol):
    """A batch in storage. Can be pickled; small."""

    def reader(self) -> BatchReader:
        """Begin to read the batch."""


class ScoreWriter(Protocol):
    """Where scores are stored. Can be pickled."""

    def write(self, reader: BatchReader, batch: TrainBatch, scores: Mapping[ModelRole, list[np.ndarray]]) -> Any:
        """Store the scores of all sequences by role, on rank 0. Returns what the driver gets."""
