"""The log of calls: calls of the samples' code and their results, durable before the code acts on them.

A step that generates samples writes it while it runs, next to its write-ahead log of finished samples:
```
runs/<run>/iterations/000042/rollout/00-000.000003-5f0c…/write_ahead/calls/0002-000000.<sha256>.arrow
```
The first number counts the attempts that wrote a log, the second the parts of this attempt. Otherwise the format of a
part is that of `cairn.storage.logs.write_ahead`. Part 0 has no rows: it marks the beginning of the attempt. If another
attempt may still be writing, part 1 has no rows either: it names the parts that were found
(`cairn.storage.logs.parts`).

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
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit
from cairn.storage.ledger.layout import CALLS_FILE, RESULTS_FILE
from cairn.storage.ledger.schemas import CALLS, LONG_RESULTS, complete
from cairn.storage.ledger.snapshots import AttemptFolder, read_recorded_table
from cairn.storage.logs.parts import PacedWriter, Part, part_bytes, recover, says
from cairn.storage.logs.write_ahead import CALLS_FOLDER as FOLDER
from cairn.storage.store.errors import LeaseLost
from cairn.storage.store.store import Store

# Calls of a rollout's samples, as committed next to its table.


def calls_of(store: Store, commit: Commit, groups: Collection[int]) -> list[dict[str, Any]]:
    """Return the calls of the samples of some groups, with long results filled in.

    The calls of each sample are in the order of their responses, those without a response last. Returns no calls if the
    rollout recorded none. Raises Damaged and Retired.
    """
    calls, results = (commit.beside(name) for name in (CALLS_FILE, RESULTS_FILE))
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


_PART = re.compile(r"(\d{4})-(\d{6})\.[0-9a-f]{64}\.arrow")


class CallLog(PacedWriter):
    """Log of calls of one attempt. Use it as a context manager."""

    def __init__(
        self,
        attempt: AttemptFolder,
        inputs_digest: str,
        *,
        encode: Callable[[list[Any]], pa.Table],
        earlier_digests: Collection[str] = (),
        deadline: float = 120.0,
    ) -> None:
        """Begin the log. From then on no earlier attempt acts on an intent that is not in `recovered`.

        Args:
            attempt: folder of the attempt.
            inputs_digest: digest of everything that the rows depend on.
            encode: converts appended items to rows of CALLS, in the log's own thread.
            earlier_digests: digests of the same inputs by the rules of earlier versions of the code.
            deadline: greatest number of seconds for `close`.
        """
        self._attempt = attempt
        self._inputs_digest = inputs_digest
        self._accepted = {digest.encode() for digest in (inputs_digest, *earlier_digests)}
        self._encode = encode
        self._written = [CALLS.empty_table()]
        before = self._others()
        self._number = 1 + max((number for parts in before.values() for number, _, _ in parts), default=-1)
        self._parts_written = count()
        self._write_part(CALLS.empty_table())
        found = self._others()
        self._known = frozenset(found)
        self.recovered = self._recover(found)
        """Rows of earlier attempts. Those of a sample are in the order of their responses; intents come last."""
        super().__init__(self._write_calls, f"calls of samples to {attempt.folder}", deadline)

    def appended(self) -> pa.Table:
        """Close the log and return the rows of everything that was appended, once they are durable."""
        self.close()
        return pa.concat_tables(self._written)

    def require_newest(self) -> None:
        """Raise LeaseLost if another attempt at the same step has begun since. Makes one listing."""
        attempt = self._attempt
        for name in self._names():
            if name not in self._known or layout.attempt_epoch(name) > layout.attempt_epoch(attempt.name):
                raise LeaseLost(
                    f"{attempt.folder} is not the newest attempt: {name} has begun and may do the same work; "
                    "this one stops"
                )

    def _names(self) -> list[str]:
        """Return the names of all other attempts at the same step and shard."""
        attempt = self._attempt
        names = map(layout.parse_attempt, attempt.store.list(attempt.beside))
        return [
            name
            for name in names
            if name is not None and name != attempt.name and layout.attempt_shard(name) == attempt.shard
        ]

    def _others(self) -> dict[str, list[tuple[int, int, str]]]:
        """Return the parts of each other attempt as (number of the attempt, number of the part, path)."""
        found: dict[str, list[tuple[int, int, str]]] = {}
        for name in self._names():
            folder = f"{self._attempt.beside}/{name}/{FOLDER}"
            matches = [(_PART.fullmatch(entry), entry) for entry in self._attempt.store.list(folder)]
            found[name] = sorted((int(m[1]), int(m[2]), f"{folder}/{entry}") for m, entry in matches if m)
        return found

    def _recover(self, found: dict[str, list[tuple[int, int, str]]]) -> pa.Table:
        ordered = sorted(found.items(), key=lambda item: _age(*item))
        parts = [Part(name, number, path) for name, own in ordered for _, number, path in own]
        recovered = recover(self._attempt.store, parts, CALLS, self._accepted)
        if (said := says(recovered, self._attempt.name)) is not None:
            self._write_part(CALLS.empty_table(), said)
        for part, table in recovered.tables:
            self._recovered_part(part.path, table)
        return _of_newest([(part.attempt, table) for part, table in recovered.tables if table is not None])

    def _write_calls(self, number: int, calls: list[Any]) -> None:
        table = self._encode(calls)
        self._write_part(table)
        self._written.append(table)
        if pc.any(pc.is_null(table["order"])).as_py():
            self.require_newest()

    def _write_part(self, table: pa.Table, metadata: Mapping[bytes, bytes] | None = None) -> None:
        sha256, data = part_bytes(table, self._inputs_digest, metadata)
        number = next(self._parts_written)
        path = self._attempt.path(f"{FOLDER}/{self._number:04d}-{number:06d}.{sha256}.arrow")
        self._attempt.store.write(path, data)
        self._wrote_part(path, table)

    def _recovered_part(self, path: str, table: pa.Table | None) -> None:
        """Register a part of an earlier attempt. `table` is None if nothing in it counts."""
        self._attempt.superseded.append(path)

    def _wrote_part(self, path: str, table: pa.Table) -> None:
        """Register a part of this attempt."""
        self._attempt.superseded.append(path)


def _age(name: str, parts: Sequence[tuple[int, int, str]]) -> tuple[int, int]:
    """Return a sort key of an attempt; later attempts have greater keys."""
    return layout.attempt_epoch(name), parts[0][0] if parts else -1


def _of_newest(tables: Sequence[tuple[str, pa.Table]]) -> pa.Table:
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
        if begun.get((group, sample)) != attempts[row]:  # it went on from the answers before this one
            begun[group, sample] = attempts[row]
            own[:] = [answer for answer in own if answer[0] < order]
        if not own or own[-1][0] + 1 == order:  # what follows a torn part is of no use
            own.append((order, row))
    kept = [row for _, own in sorted(answers.items()) for _, row in own]
    return rows.take(pa.array([*kept, *sorted(intents.values())], pa.int64()))
