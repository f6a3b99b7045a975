"""The endless stream of prompts that a run draws from: one pass through the data after the other.

A position in the stream is a cursor: epoch `cursor // n`, place `cursor % n` in that epoch's order. Every position has
one row, fixed by the seed, so the cursor is all that a run has to remember, and it is the group's id too.
"""

import functools
import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from pydantic import JsonValue

from cairn.tasks.data.errors import BadData, BadPrompt


class Row(Protocol):
    """What is drawn."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...


AnyRow = TypeVar("AnyRow", bound=Row, covariant=True)


class Source(Protocol[AnyRow]):
    """What is drawn from."""

    @property
    def path(self) -> str: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> AnyRow: ...


@dataclass(frozen=True)
class DrawnRow(Generic[AnyRow]):
    """A row at its position in the stream."""

    group_id: int
    """The position: unique in a run."""
    epoch: int
    row: AnyRow


@dataclass(frozen=True)
class Draw(Generic[AnyRow]):
    """Consecutive rows of the stream."""

    rows: list[DrawnRow[AnyRow]]
    cursor: JsonValue
    """Where the next draw begins: a position of the stream, or the state of what is no plain stream."""
    passed_over: int
    """Prompts that were too long, that the chat template refuses, or that a person has put in quarantine."""
    refusal: str | None = None
    """Why the last row that gives no prompt gives none, and what to do."""


def drawn_so_far(cursor: JsonValue) -> int:
    """Above the id of every group that was drawn before a cursor of any kind."""
    if isinstance(cursor, dict):
        cursor = cursor["drawn"]
    assert isinstance(cursor, int)
    return cursor


@functools.lru_cache(maxsize=32)
def order(seed: int | str, epoch: int, n: int) -> np.ndarray:
    """[n] int64, read-only: the rows of one epoch in their random order, the same on every machine and version.

    The rows are sorted by the raw output of the counter-based generator Philox, whose stream numpy guarantees never to
    change (NEP 19; it gives no such guarantee for `permutation`).
    """
    key = np.frombuffer(hashlib.blake2b(f"order/{seed}/{epoch}".encode(), digest_size=16).digest(), "<u8")
    permutation = np.argsort(np.random.Philox(key=key).random_raw(n), kind="stable")
    permutation.flags.writeable = False
    return permutation


def draw(
    data: Source[AnyRow],
    cursor: int,
    count: int,
    *,
    seed: int | str,
    shuffle: bool,
    max_prompt_len: int | None,
    without: Collection[int] = (),
) -> Draw[AnyRow]:
    """The next `count` prompts of at most `max_prompt_len` tokens after `cursor`; longer ones are passed over, and so
    are rows that give no prompt and those of `without`.

    A pure function of its arguments. A draw may span any number of epochs.

    Raises:
        BadData: no prompt of the data will do.
    """
    n = len(data)
    rows: list[DrawnRow[AnyRow]] = []
    position, last_taken, shortest, refusal = cursor, cursor - 1, None, None
    while len(rows) < count:
        epoch, place = divmod(position, n)
        index = int(order(seed, epoch, n)[place]) if shuffle else place
        try:
            row = None if index in without else data.row(index)
        except BadPrompt as error:
            row, refusal = None, error
        if row is not None:
            length = len(row.prompt_ids)
            if max_prompt_len is None or length <= max_prompt_len:
                rows.append(DrawnRow(position, epoch, row))
                last_taken = position
            else:
                shortest = length if shortest is None else min(shortest, length)
        position += 1
        # So many positions in a row hold at least one whole epoch, wherever they begin.
        if position - last_taken >= 2 * n:
            if shortest is None and refusal is None:
                raise BadData(f"every prompt of {data.path} is in quarantine: lift that of some")
            if shortest is None:
                raise BadData(f"no row of {data.path} gives a prompt; the last one: {refusal}")
            raise BadData(
                f"{data.path}: every prompt is longer than {max_prompt_len} tokens, the shortest has {shortest}: raise "
                "rollout_max_prompt_len, lower rollout_max_response_len, or use a model with a longer context"
            )
    return Draw(rows, position, position - cursor - len(rows), None if refusal is None else str(refusal))
