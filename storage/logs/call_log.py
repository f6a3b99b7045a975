"""The log of calls: what the code of samples was given, durable before the step is done, and before it acts on it.

A step that generates samples keeps one beside its write-ahead log of finished samples while it runs:
```
runs/<run>/iterations/000042/rollout/00-000.000003-5f0c…/write_ahead/calls/0002-000000.<sha256>.arrow
```
The first number counts the attempts that kept one, the second the parts of this one; otherwise a part is as that log
has it (`cairn.storage.logs.write_ahead`). Part 0 has no row: it says that the attempt has begun. Where others may
write, part 1 has none either: it says what was found of theirs (`cairn.storage.logs.parts`).

An attempt begins before it reads what others left, and looks for others again between making an intent durable and
saying so. So of two attempts that know nothing of each other, as where a driver was cut off and another took its run
over, either the later one reads the intent of the earlier one, or the earlier one learns that it is not to act on it.

| a later attempt finds | meaning |
|---|---|
| a part of the same inputs | its rows count, but for an earlier attempt's answers from where a later one's begin |
| what an earlier attempt wrote after a later one had looked | it never counts, nor was an intent acted on |
| an intent without an answer | the call was under way, or about to be |
| a part that is torn, or of other inputs | ignored |
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

# The calls of a rollout's samples, as they were committed beside its table.


def calls_of(store: Store, commit: Commit, groups: Collection[int]) -> list[dict[str, Any]]:
    """The calls of the samples of some groups, long results filled in, in the order in which each sample's were
    answered, those without an answer last; none where the rollout recorded none. Raises Damaged, Retired."""
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
    """That of one attempt. A context manager, as the write-ahead log of samples is."""

    def __init__(
        self,
        attempt: AttemptFolder,
        inputs_digest: str,
        *,
        encode: Callable[[list[Any]], pa.Table],
        earlier_digests: Collection[str] = (),
        deadline: float = 120.0,
    ) -> None:
        """Begin: from here on no earlier attempt acts on an intent that is not in `recovered`.

        Args:
            inputs_digest: of everything the rows depend on.
            encode: makes rows of CALLS of what was appended, in the log's own thread.
            earlier_digests: of the same inputs by the rules of earlier versions of the code.
            deadline: seconds that `close` may take.
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
        """Rows of earlier attempts, those of a sample in the order in which they were answered, intents last."""
        super().__init__(self._write_calls, f"calls of samples to {attempt.folder}", deadline)

    def appended(self) -> pa.Table:
        """The rows of everything that was appended. Returns when they are durable; then the log is closed."""
        self.close()
        return pa.concat_tables(self._written)

    def require_newest(self) -> None:
        """Raise LeaseLost if another attempt at the same has begun since. One listing."""
        attempt = self._attempt
        for name in self._names():
            if name not in self._known or layout.attempt_epoch(name) > layout.attempt_epoch(attempt.name):
                raise LeaseLost(
                    f"{attempt.folder} is not the newest attempt: {name} has begun, and what this one was about to "
                    "do, it may do"
                )

    def _names(self) -> list[str]:
        """Of all other attempts at the same."""
        attempt = self._attempt
        names = map(layout.parse_attempt, attempt.store.list(attempt.beside))
        return [
            name
            for name in names
            if name is not None and name != attempt.name and layout.attempt_shard(name) == attempt.shard
        ]

    def _others(self) -> dict[str, list[tuple[int, int, str]]]:
        """The parts of other attempts: (number of the attempt, of the part, path)."""
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
        """There is a part of an earlier attempt; None where nothing in it counts."""
        self._attempt.superseded.append(path)

    def _wrote_part(self, path: str, table: pa.Table) -> None:
        """There is a part of this attempt."""
        self._attempt.superseded.append(path)


def _age(name: str, parts: Sequence[tuple[int, int, str]]) -> tuple[int, int]:
    """Of an attempt: later ones have greater ones."""
    return layout.attempt_epoch(name), parts[0][0] if parts else -1


def _of_newest(tables: Sequence[tuple[str, pa.Table]]) -> pa.Table:
    """What counts of the rows of attempts, which come one attempt after the other."""
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
