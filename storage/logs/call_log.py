"""The log of calls: calls of the samples' code and their results, durable before the code acts on them.

A step that generates samples, or a stream's driver, writes it next to its log of samples:
```
runs/<run>/iterations/000042/rollout/00-000.000003-5f0c…/write_ahead/calls/0002-000000.<sha256>.arrow
runs/<run>/stream/000003-5f0c…/write_ahead/calls/0002-000000.<sha256>.arrow
```
The first number counts the attempts that wrote a log, the second the parts of this attempt. Part 0 has no rows: it
marks the beginning of the attempt. If another attempt may still be writing, part 1 has no rows either: it names the
parts that were found (`cairn.storage.logs.parts`).

An attempt writes its first part before it reads the parts of others. After it has made an intent (a call without a
response) durable, it checks for other attempts before it acts. Consider two attempts that do not know of each other,
because one driver was cut off and another took its run over. Either the later attempt reads the earlier one's intent,
or the earlier one notices that it must not act on it.

| a later attempt finds | meaning |
|---|---|
| a part of the same inputs | its rows count, except an earlier attempt's responses after the start of a later one's |
| parts written after a later attempt looked | they never count, and their intents were not acted on |
| an intent without a response | the call was running, or about to start |
| a torn part, or a part of other inputs | ignored |
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit
from cairn.storage.ledger.layout import CALLS_FILE, RESULTS_FILE
from cairn.storage.ledger.schemas import CALLS, LONG_RESULTS, complete
from cairn.storage.ledger.snapshots import PARTS, AttemptFolder, read_recorded_table
from cairn.storage.logs.log import LOG_IS_OPEN, Log
from cairn.storage.logs.parts import Part, read_any_part
from cairn.storage.store.errors import LeaseLost
from cairn.storage.store.store import Store

# Calls of a rollout's samples, as committed next to its table.


def calls_of(store: Store, commit: Commit, groups: Collection[int]) -> list[dict[str, Any]]:
    """Return the calls of the samples of some groups, with long results filled in.

    The calls of each sample are in the order of their responses, those without a response last. Returns no calls if the
    rollout recorded none. Raises Damaged and Retired.
    """
    calls, results = (commit.side_file(name) for name in (CALLS_FILE, RESULTS_FILE))
    if calls is None:
        return []
    table = complete(read_recorded_table(store, commit.run, calls), CALLS)
    few = table.filter(pc.is_in(table["group_id"], pa.array(sorted(groups), pa.int64())))
    rows = few.to_pylist()
    wanted = {row["result_digest"] for row in rows if row["result_digest"] is not None and row["result"] is None}
    if wanted and results is not None:
        table = read_recorded_table(store, commit.run, results)
        table = table.filter(pc.is_in(table["sha256"], pa.array(sorted(wanted), pa.string())))
        long = dict(zip(*(table[name].to_pylist() for name in LONG_RESULTS.names), strict=True))
        for row in rows:
            row["result"] = long.get(row["result_digest"], row["result"])
    return sorted(rows, key=lambda row: (row["order"] is None, row["order"] or 0))


FOLDER = f"{PARTS}/calls"
_PART = re.compile(r"(\d{4})-(\d{6})\.[0-9a-f]{64}\.arrow")


class CallLog(Log):
    """Log of calls of one attempt, or of a stream's driver."""

    contents = "calls of samples"

    def __init__(
        self,
        attempt: AttemptFolder,
        inputs_digest: str,
        *,
        encode: Callable[[list[Any]], pa.Table],
        earlier_digests: Collection[str] = (),
        groups: Collection[int] | None = None,
        deadline: float = 120.0,
    ) -> None:
        """Begin the log. From then on no earlier attempt acts on an intent that is not in `recovered`. See `Log`."""
        super().__init__(
            attempt,
            inputs_digest,
            schema=CALLS,
            encode=encode,
            earlier_digests=earlier_digests,
            groups=groups,
            deadline=deadline,
        )
        before = self._others()
        self._number = 1 + max((number for parts in before.values() for number, _, _ in parts), default=-1)
        self._write_part(CALLS.empty_table(), groups={LOG_IS_OPEN})
        others = self._others()
        self._known = frozenset(others)
        ordered = sorted(others.items(), key=lambda item: _age(*item))
        parts = [Part(name, number, path) for name, own in ordered for _, number, path in own]
        self.recovered = _valid_rows([(part.attempt, table) for part, table in self._recovered(parts)])
        """Rows of earlier attempts. Those of a sample are in the order of their responses; intents come last."""

    def require_newest(self) -> None:
        """Raise LeaseLost if another attempt at the same step has begun since. Makes one listing."""
        attempt = self._attempt
        for name in self._attempts():
            if name not in self._known or layout.attempt_epoch(name) > layout.attempt_epoch(attempt.name):
                raise LeaseLost(
                    f"{attempt.folder} is not the newest attempt: {name} has begun and may do the same work; "
                    "this one stops"
                )

    def _others(self) -> dict[str, list[tuple[int, int, str]]]:
        """Return the parts of each other attempt as (number of the attempt, number of the part, path)."""
        others: dict[str, list[tuple[int, int, str]]] = {}
        for name in self._attempts():
            folder = f"{self._attempt.attempts}/{name}/{FOLDER}"
            matches = [(_PART.fullmatch(entry), entry) for entry in self._attempt.store.list(folder)]
            others[name] = sorted((int(m[1]), int(m[2]), f"{folder}/{entry}") for m, entry in matches if m)
        return others

    def _write_rows(self, items: list[Any]) -> pa.Table:
        table = super()._write_rows(items)
        if pc.any(pc.is_null(table["order"])).as_py():
            self.require_newest()
        return table

    def _part_name(self, number: int) -> str:
        return f"{FOLDER}/{self._number:04d}-{number:06d}"


def _age(name: str, parts: Sequence[tuple[int, int, str]]) -> tuple[int, int]:
    """Return a sort key of an attempt; later attempts have greater keys."""
    return layout.attempt_epoch(name), parts[0][0] if parts else -1


def _valid_rows(tables: Sequence[tuple[str, pa.Table]]) -> pa.Table:
    """Return the rows that count. `tables` are the rows of attempts, in the order of the attempts."""
    if not tables:
        return CALLS.empty_table()
    rows = pa.concat_tables([table for _, table in tables])
    attempts = [name for name, table in tables for _ in range(table.num_rows)]
    columns = zip(*(rows[name].to_pylist() for name in ("group_id", "sample_index", "order", "call")), strict=True)
    answers: dict[tuple[int, int], list[tuple[int, int]]] = {}
    begun: dict[tuple[int, int], str] = {}
    intents: dict[tuple[int, int, str], int] = {}
    for row, (group, sample, order, call) in enumerate(columns):
        if order is None:
            intents[group, sample, call] = row
            continue
        own = answers.setdefault((group, sample), [])
        if begun.get((group, sample)) != attempts[row]:  # the attempt resumed from the answers before this one
            begun[group, sample] = attempts[row]
            own[:] = [answer for answer in own if answer[0] < order]
        if not own or own[-1][0] + 1 == order:  # rows after a torn part are useless
            own.append((order, row))
    valid = [row for _, own in sorted(answers.items()) for _, row in own]
    return rows.take(pa.array([*valid, *sorted(intents.values())], pa.int64()))


def is_calls(path: str) -> bool:
    """Return whether a store path is that of a part of a log of calls."""
    return f"/{FOLDER}/" in path and path.endswith(".arrow")


def groups_of_calls(store: Store, paths: Collection[str]) -> set[int]:
    """Return the groups with calls in parts, from the parts' store paths. Calls do not record their prompt."""
    tables = (read_any_part(store, path) for path in paths if is_calls(path))
    return {group for table in tables if table is not None for group in table["group_id"].to_pylist()}
