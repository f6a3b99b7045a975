"""Decisions of a filter step, for the steps that read them. Its commit is the selection of an iteration."""

import itertools
from collections.abc import Callable
from typing import TypeVar

from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.schemas import REMOVED, STALE_WEIGHTS, Disposition
from cairn.tasks.durable.recorded_run import RecordedRun

LookedUp = TypeVar("LookedUp", Commit, Commit | None)

GroupPlace = tuple[int, str, int]
"""(iteration, shard, group_id): the place where the samples of a group are stored."""


def last_selection(run: RecordedRun, index: int) -> Commit:
    """Return the filter step that filled the batch of iteration `index`. Raises Damaged if it is missing although it
    must exist."""
    return _filling(run.committed, index)


def find_selection(run: RecordedRun, index: int) -> Commit | None:
    """Return the filter step that filled the batch of iteration `index`, or None while it is not full."""
    return _filling(run.find, index)


def _filling(look_up: Callable[[int, Step, str], LookedUp], index: int) -> LookedUp:
    """Return the first round's filter step that is full or, from `find`, None at the first missing one."""
    for round in itertools.count():
        selection = look_up(index, Step.FILTER, f"{round:02d}")
        if selection is None or selection.values["full"]:
            return selection
    raise AssertionError("unreachable")


def number(selection: Commit, name: str) -> int:
    """Return one of the integers in a filter step's values: `missing`, `cursor`, `round`, `buffered`, `unfinished`."""
    value = selection.values[name]
    assert isinstance(value, int)
    return value


def trained_groups(run: RecordedRun, selection: Commit) -> list[GroupPlace]:
    """Return the groups to train on, in the order of the batch."""
    return _places(run, selection, Disposition.TRAIN)


def max_ages(run: RecordedRun, selection: Commit) -> dict[int, int | None]:
    """Return the maximum age of trainable tokens by group id; None where the filter step set no bound."""
    table = run.read(selection)
    bounds = table.column("max_age").to_pylist() if "max_age" in table.column_names else [None] * table.num_rows
    return dict(zip(table.column("group_id").to_pylist(), bounds, strict=True))


def stale_weights(run: RecordedRun, selection: Commit) -> dict[int, list[float]]:
    """Return the weights of tokens that are trained on although they are older than `max_ages`, by group id.

    A group's list begins with the first age above its bound. Groups without such tokens are absent.
    """
    table = run.read(selection)
    if STALE_WEIGHTS.name not in table.column_names:
        return {}
    rows = zip(table.column("group_id").to_pylist(), table.column(STALE_WEIGHTS.name).to_pylist(), strict=True)
    return {group_id: weights for group_id, weights in rows if weights}


def removed_samples(run: RecordedRun, selection: Commit) -> dict[int, frozenset[int]]:
    """Return the sample indices that the sample filter took out of the loss, by group id. Groups without any are
    absent."""
    table = run.read(selection)
    if REMOVED.name not in table.column_names:
        return {}
    rows = zip(table.column("group_id").to_pylist(), table.column(REMOVED.name).to_pylist(), strict=True)
    return {group_id: frozenset(removed) for group_id, removed in rows if removed}


def unfinished_groups(run: RecordedRun, selection: Commit) -> list[GroupPlace]:
    """Return the groups that wait to be continued, in their recorded order."""
    return _places(run, selection, Disposition.CONTINUE) if number(selection, "unfinished") else []


def _places(run: RecordedRun, selection: Commit, disposition: Disposition) -> list[GroupPlace]:
    rows = run.read(selection).to_pylist()
    return [(row["iteration"], row["shard"], row["group_id"]) for row in rows if row["disposition"] == disposition]
