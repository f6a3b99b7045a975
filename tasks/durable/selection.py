"""What a filter step has decided, as later steps read it: its commit is the selection of an iteration."""

import itertools
from collections.abc import Callable
from typing import TypeVar

from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.schemas import REMOVED, STALE_WEIGHTS, Disposition
from cairn.tasks.durable.recorded_run import RecordedRun

FoundCommit = TypeVar("FoundCommit", Commit, Commit | None)

GroupPlace = tuple[int, str, int]
"""(iteration, shard, group_id): where the samples of a group lie."""


def last_selection(run: RecordedRun, index: int) -> Commit:
    """The filter step that filled the batch of iteration `index`. Raises Damaged where there must be one and is not."""
    return _filling(run.committed, index)


def is_collected(run: RecordedRun, index: int) -> bool:
    """Whether the batch of iteration `index` is full."""
    return _filling(run.find, index) is not None


def _filling(look_up: Callable[[int, Step, str], FoundCommit], index: int) -> FoundCommit:
    """The first round's filter step that is full, or not there."""
    for round in itertools.count():
        selection = look_up(index, Step.FILTER, f"{round:02d}")
        if selection is None or selection.values["full"]:
            return selection
    raise AssertionError("unreachable")


def number(selection: Commit, name: str) -> int:
    """One of the whole numbers among a filter step's values: `missing`, `cursor`, `round`, `buffered`, `unfinished`."""
    value = selection.values[name]
    assert isinstance(value, int)
    return value


def trained_groups(run: RecordedRun, selection: Commit) -> list[GroupPlace]:
    """The groups to train on, in the order of the batch."""
    return _places(run, selection, Disposition.TRAIN)


def max_ages(run: RecordedRun, selection: Commit) -> dict[int, int | None]:
    """The oldest tokens of each group that may be trained on, by its id; None where the filter step set no bound."""
    table = run.read(selection)
    bounds = table.column("max_age").to_pylist() if "max_age" in table.column_names else [None] * table.num_rows
    return dict(zip(table.column("group_id").to_pylist(), bounds, strict=True))


def stale_weights(run: RecordedRun, selection: Commit) -> dict[int, list[float]]:
    """Of groups with tokens that are trained on though they are older than `max_ages`, the weights of these, by age
    from the first one above it; empty where there is none."""
    table = run.read(selection)
    if STALE_WEIGHTS.name not in table.column_names:
        return {}
    rows = zip(table.column("group_id").to_pylist(), table.column(STALE_WEIGHTS.name).to_pylist(), strict=True)
    return {group_id: weights for group_id, weights in rows if weights}


def removed_samples(run: RecordedRun, selection: Commit) -> dict[int, frozenset[int]]:
    """The samples of trained groups, by their places in them, that the sample filter took out of the loss; empty where
    there is none."""
    table = run.read(selection)
    if REMOVED.name not in table.column_names:
        return {}
    rows = zip(table.column("group_id").to_pylist(), table.column(REMOVED.name).to_pylist(), strict=True)
    return {group_id: frozenset(removed) for group_id, removed in rows if removed}


def unfinished_groups(run: RecordedRun, selection: Commit) -> list[GroupPlace]:
    """The groups that wait to be continued, in the order in which they are."""
    return _places(run, selection, Disposition.CONTINUE) if number(selection, "unfinished") else []


def _places(run: RecordedRun, selection: Commit, disposition: Disposition) -> list[GroupPlace]:
    rows = run.read(selection).to_pylist()
    return [(row["iteration"], row["shard"], row["group_id"]) for row in rows if row["disposition"] == disposition]
