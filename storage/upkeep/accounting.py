"""Accounting of groups: a group that a run generated is trained on once, dropped, or still open.

The last filter step of an iteration (its cut) selects its batch. It has a row for every group that the iteration
generated, and for every group that the cut before left open. Iterations are read in order:

| a group of | must be in the cut of |
|---|---|
| a rollout of iteration i | i |
| the cut of i, buffered or to be continued | i + 1, with the samples that it has then |
| the cut of i, trained on or dropped | none after i |

A cut that was not made from the one before takes no groups over: it is the first of a fork whose data hold the
responses. Groups that were open then stay open. An iteration whose tables are retired or damaged cannot be checked, and
neither can the origin of the groups that the next iteration takes from it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.redacted import Fault, Finding, commit_finding
from cairn.storage.ledger.schemas import SCHEMAS, Disposition
from cairn.storage.ledger.snapshots import read_columns
from cairn.storage.records import Record
from cairn.storage.store.store import Store

Unread = Literal["retired", "unreadable"]
"""Reason why a table cannot be read."""

_CUT_COLUMNS = ("group_id", "iteration", "shard", "disposition", "reason")
_NO_REASON = "not_kept"
"""Reason of groups that a user's filter dropped without a reason."""
_VERBS = {
    Disposition.TRAIN: "trained on",
    Disposition.DROP: "dropped",
    Disposition.BUFFER: "buffered",
    Disposition.CONTINUE: "left unfinished",
}


class GroupCounts(Record):
    """Counts of a run's groups by outcome, as far as its tables exist."""

    trained: int
    """Groups in the batch of an iteration."""
    dropped: dict[str, int]
    """Dropped groups by reason."""
    open: int
    """Groups that are buffered, unfinished, in a stream, or of an iteration whose batch is not full yet."""
    retired: tuple[int, ...]
    """Iterations whose groups cannot be checked because retention removed their tables."""
    unreadable: tuple[int, ...]
    """Iterations whose groups cannot be checked because their tables or commits are damaged."""


def records_groups(commit: str) -> bool:
    """Return whether the tables of a commit record which groups exist, or what becomes of them.

    `commit` is the name of the commit, or of a record of commits.
    """
    name = commit.partition("/")[2]
    return name.partition(".")[0] in (Step.ROLLOUT, Step.FILTER) or layout.parse_record(f"{name}.json") is not None


@dataclass(frozen=True)
class GroupTable:
    """Table of a rollout or filter step."""

    commit: Commit
    path: str
    """Path in the store."""
    bytes: int
    """Current size. It differs from the committed size if the table was redacted."""
    unread: Unread | None = None

    def read(self, store: Store, columns: Sequence[str]) -> pa.Table:
        """Return some columns. Raises FileNotFoundError, and ValueError if the file is not such a table."""
        schema = SCHEMAS[self.commit.step]
        table = read_columns(lambda start, end: store.read_range(self.path, start, end), self.bytes, columns)
        return table.cast(pa.schema([schema.field(name) for name in columns]))


@dataclass(frozen=True)
class _Row:
    """A group in a cut."""

    group_id: int
    iteration: int
    """Iteration that stores the samples."""
    rollout: str
    """Commit that holds the samples."""
    disposition: Disposition
    reason: str | None


@dataclass(frozen=True)
class _Fate:
    """Final decision of a cut about groups."""

    cut: str
    disposition: Disposition


class Accounting:
    """Follows groups from iteration to iteration. Stores a few bytes of every group, and nothing of its samples."""

    def __init__(self, store: Store, readers: Executor):
        self._store, self._readers = store, readers
        self._fates: dict[int, _Fate] = {}
        self._open: dict[int, _Row] | None = {}
        """Groups that the newest cut left open, by id; None if they cannot be read."""
        self._cut: Commit | None = None
        """Newest cut."""
        self._abandoned = 0
        """Number of open groups that no later cut takes over."""
        self._without_cut: tuple[int, frozenset[int]] | None = None
        """The iteration before with its generated groups, if it has no cut."""
        self._dropped: Counter[str] = Counter()
        self._unaccounted: dict[Unread, list[int]] = {"retired": [], "unreadable": []}

    def take(self, iteration: int, tables: Sequence[GroupTable], *, whole: bool) -> list[Finding]:
        """Account for the next iteration that has commits. Return the contradictions.

        Args:
            iteration: number of the iteration.
            tables: tables of its steps that record groups.
            whole: whether these are all of them.
        """
        if not tables and whole:  # a stream has admitted prompts for it, and no more
            return []
        if self._without_cut is not None:  # a later one cannot begin without it
            self._pass_over(self._without_cut[0], "unreadable")
        unread = {table.unread for table in tables}
        if not whole or "unreadable" in unread:
            self._pass_over(iteration, "unreadable")
            return []
        if "retired" in unread:
            self._pass_over(iteration, "retired")
            return []
        try:
            generated = self._generated(tables)
            cut = next((t for t in tables if t.commit.step is Step.FILTER and t.commit.values.get("full")), None)
            rows = None if cut is None else self._rows(cut)
        except (FileNotFoundError, ValueError):
            self._pass_over(iteration, "unreadable")
            return []
        if cut is None or rows is None:
            self._without_cut = (iteration, frozenset(generated)) if tables else None
            return []
        return list(self._account(cut.commit, rows, generated))

    def groups(self) -> GroupCounts:
        """Return the counts of all groups, after the last iteration."""
        waiting = set(self._open or ()) | (self._without_cut[1] if self._without_cut is not None else set())
        return GroupCounts(
            trained=sum(fate.disposition is Disposition.TRAIN for fate in self._fates.values()),
            dropped=dict(sorted(self._dropped.items())),
            open=len(waiting) + self._abandoned,
            retired=tuple(self._unaccounted["retired"]),
            unreadable=tuple(self._unaccounted["unreadable"]),
        )

    def _pass_over(self, iteration: int, why: Unread) -> None:
        self._unaccounted[why].append(iteration)
        self._open = self._without_cut = self._cut = None

    def _generated(self, tables: Sequence[GroupTable]) -> dict[int, str]:
        """Return the rollout with the newest samples of each group that an iteration generated or continued."""
        rollouts = sorted((table for table in tables if table.commit.step is Step.ROLLOUT), key=_round_and_part)
        generated: dict[int, str] = {}
        for rollout, ids in zip(rollouts, self._readers.map(self._ids, rollouts), strict=True):
            generated |= dict.fromkeys(ids, rollout.commit.name)
        return generated

    def _ids(self, rollout: GroupTable) -> list[int]:
        ids: list[int] = rollout.read(self._store, ["group_id"]).column("group_id").unique().to_pylist()
        return ids

    def _rows(self, cut: GroupTable) -> list[_Row]:
        columns = cut.read(self._store, _CUT_COLUMNS).to_pydict().values()
        return [
            _Row(id, index, layout.commit_name(index, Step.ROLLOUT, shard), Disposition(disposition), reason)
            for id, index, shard, disposition, reason in zip(*columns, strict=True)
        ]

    def _account(self, cut: Commit, rows: Sequence[_Row], generated: Mapping[int, str]) -> Iterator[Finding]:
        known, before = self._open is not None, self._cut
        carried = self._open or {}
        if before is not None and before.name not in cut.inputs:
            self._abandoned += len(carried)
            carried = {}
        expected = {id: row.rollout for id, row in carried.items()} | dict(generated)
        fates = {disposition: _Fate(cut.name, disposition) for disposition in (Disposition.TRAIN, Disposition.DROP)}
        seen: set[int] = set()
        self._open, self._cut = {}, cut
        for row in rows:
            yield from self._contradictions(cut, row, expected.get(row.group_id), seen, known)
            seen.add(row.group_id)
            if row.disposition not in fates:
                self._open[row.group_id] = row
            elif row.group_id not in self._fates:
                self._fates[row.group_id] = fates[row.disposition]
                if row.disposition is Disposition.DROP:
                    self._dropped[row.reason or _NO_REASON] += 1
        for id in sorted(expected.keys() - seen):
            if id in generated:
                was = f"was generated in {expected[id]}"
            else:
                was = f"was {_VERBS[carried[id].disposition]} by {before.name if before is not None else 'a cut'}"
            yield commit_finding(cut, Fault.GROUP_LOST, f"group {id} {was} and is not among the groups of {cut.name}")

    def _contradictions(
        self, cut: Commit, row: _Row, rollout: str | None, seen: set[int], known: bool
    ) -> Iterator[Finding]:
        """Yield the contradictions between a row of a cut and the commits before.

        Args:
            cut: commit of the cut.
            row: the row.
            rollout: commit with the group's newest samples according to the commits before.
            seen: groups of earlier rows of the cut.
            known: whether all commits before were read.
        """
        id, verb, fate = row.group_id, _VERBS[row.disposition], self._fates.get(row.group_id)
        repeats = fate is not None and fate.disposition is row.disposition is Disposition.TRAIN
        fault = Fault.TRAINED_TWICE if repeats else Fault.GROUP_DIFFERS
        if id in seen:
            message = f"group {id} is {'trained on twice' if repeats else 'named twice'} in {cut.name}"
            yield commit_finding(cut, fault, message)
        elif fate is not None:
            message = f"group {id} is {verb} in {cut.name}, although {_VERBS[fate.disposition]} in {fate.cut}"
            yield commit_finding(cut, fault, message)
        elif rollout is None and (known or row.iteration == cut.iteration):
            message = f"group {id} is {verb} in {cut.name}, but neither the cut before nor a rollout has it"
            yield commit_finding(cut, Fault.GROUP_DIFFERS, message)
        elif rollout is not None and rollout != row.rollout:
            message = f"group {id} is {verb} in {cut.name} with samples of {row.rollout}, its newest are in {rollout}"
            yield commit_finding(cut, Fault.GROUP_DIFFERS, message)


def _round_and_part(rollout: GroupTable) -> tuple[str, ...]:
    """Return a sort key that orders the parts of a shard's name as numbers."""
    return tuple(part.zfill(9) for part in (rollout.commit.shard or "").split("-"))
