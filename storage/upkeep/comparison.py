"""What two commits of the same step made, held against each other.

Only what they made counts: weight versions, state digest, values, and the content of every file. When and where it was
made, by which attempt and in how many seconds, does not; nor what only one of them notes, since a later version of the
code made it: another value, or a column that its table got since.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from cairn.storage.ledger.commits import Commit, OutputFile
from cairn.storage.ledger.schemas import NOT_MADE, SCHEMAS
from cairn.storage.ledger.snapshots import read_recorded_table
from cairn.storage.store.errors import Retired
from cairn.storage.store.store import Store

_COMPARED = ("weight_version_in", "weight_version_out", "state_digest")
_TABLE = ".parquet"


class Comparison(NamedTuple):
    """What two commits made, in sentences; none if both made the same."""

    differences: list[str]
    retired: list[str]
    """On tables of other digests that one of the runs does not keep any more, so that nobody can tell: written by one
    version of the code they hold other values, by two they may hold the same."""


def compare(ours: Commit, our_store: Store, theirs: Commit, their_store: Store) -> Comparison:
    """Hold two commits against each other. Reads tables only where their digests differ. Raises Damaged."""
    retired: list[str] = []
    found = [
        f"{field} is {getattr(ours, field)} and {getattr(theirs, field)}"
        for field in _COMPARED
        if getattr(ours, field) != getattr(theirs, field)
    ]
    our_values, their_values = (
        {name: commit.values[name] for name in ours.values.keys() & theirs.values.keys()} for commit in (ours, theirs)
    )
    if our_values != their_values:
        found.append(f"values is {our_values} and {their_values}")
    our_files, their_files = _files(ours), _files(theirs)
    for name in sorted({*our_files, *their_files}):
        first, second = our_files.get(name), their_files.get(name)
        if first is None or second is None:
            found.append(f"{name} is in one only")
        elif (first.content or first.sha256) != (second.content or second.sha256):
            if not name.endswith(_TABLE):
                found.append(f"{name} has other bytes")
            elif first.rows != second.rows:
                found.append(f"{name}: {first.rows} and {second.rows} rows")
            else:
                try:
                    tables = (
                        read_recorded_table(our_store, ours.run, first),
                        read_recorded_table(their_store, theirs.run, second),
                    )
                except Retired as error:
                    retired.append(f"{name} has another digest, and its rows cannot be compared: {error}")
                    continue
                found += [f"{name}: {sentence}" for sentence in table_differences(*tables, SCHEMAS.get(ours.step))]
    return Comparison(found, retired)


def table_differences(ours: pa.Table, theirs: pa.Table, schema: pa.Schema | None = None) -> list[str]:
    """Where two tables hold different values, columns that were measured left out, and those that the one was written
    before the schema had them."""
    later = {field.name for field in schema or () if field.nullable}
    later &= {*ours.column_names} ^ {*theirs.column_names}
    ours, theirs = (table.select([n for n in table.column_names if n not in later]) for table in (ours, theirs))
    if ours.schema != theirs.schema:
        return ["the columns differ"]
    if ours.num_rows != theirs.num_rows:
        return [f"{ours.num_rows} and {theirs.num_rows} rows"]
    rows_by_column = {
        name: _differing_rows(ours.column(name).to_pylist(), theirs.column(name).to_pylist())
        for name in ours.column_names
        if name not in NOT_MADE
    }
    columns = [name for name, rows in rows_by_column.items() if rows]
    rows = sorted(set().union(*rows_by_column.values()))
    if not rows:
        return [] if later else ["other bytes for equal values"]
    return [f"{', '.join(columns)} differ in {len(rows)} of {ours.num_rows} rows, first in row {rows[0]}"]


def _files(commit: Commit) -> dict[str, OutputFile]:
    """By their names in the attempt's folder."""
    return {output.path.partition(f"/{commit.attempt}/")[2]: output for output in commit.outputs}


def _differing_rows(ours: Sequence[Any], theirs: Sequence[Any]) -> set[int]:
    # NaN equals nothing, not even itself, but it is spelled the same.
    return {row for row, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b and repr(a) != repr(b)}
