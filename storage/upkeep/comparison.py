"""Comparison of what two commits of the same step produced.

It compares weight versions, state digest, values, and the content of every file. It ignores time, place, attempt and
duration. It also ignores what only one commit records because a later version of the code made it: a further value, or
a column that the table got later.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from cairn.storage.ledger.commits import Commit, OutputFile
from cairn.storage.ledger.schemas import ALL_MEASURED, SCHEMAS
from cairn.storage.ledger.snapshots import read_recorded_table
from cairn.storage.store.errors import Retired
from cairn.storage.store.store import Store

_COMPARED = ("weight_version_in", "weight_version_out", "state_digest")
_TABLE = ".parquet"


class Comparison(NamedTuple):
    """Differences between two commits, in sentences; empty if both produced the same."""

    differences: list[str]
    retired: list[str]
    """Sentences on tables with different digests that cannot be compared because one run's retention removed them. If
    one version of the code wrote both, their values differ; if two versions wrote them, their values may be equal."""


def compare(ours: Commit, our_store: Store, theirs: Commit, their_store: Store) -> Comparison:
    """Compare two commits. Reads tables only if their digests differ. Raises Damaged."""
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
            found.append(f"{name} is in only one of them")
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
    """Return the differences between the values of two tables, in sentences.

    Ignores measured columns, and columns that one table lacks because it is older than their entry in the schema.
    """
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
        if name not in ALL_MEASURED
    }
    columns = [name for name, rows in rows_by_column.items() if rows]
    rows = sorted(set().union(*rows_by_column.values()))
    if not rows:
        return [] if later else ["other bytes for equal values"]
    return [f"{', '.join(columns)} differ in {len(rows)} of {ours.num_rows} rows, first in row {rows[0]}"]


def _files(commit: Commit) -> dict[str, OutputFile]:
    """Return the files by their names in the attempt's folder."""
    return {output.path.partition(f"/{commit.attempt}/")[2]: output for output in commit.outputs}


def _differing_rows(ours: Sequence[Any], theirs: Sequence[Any]) -> set[int]:
    # NaN is not equal to itself, but its repr is.
    return {row for row, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b and repr(a) != repr(b)}
