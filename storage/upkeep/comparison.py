"""Comparison of what two commits of the same step produced.

It compares weight versions, state digest, values, and the content of every file. It ignores time, place, attempt and
duration, and in what form a sync step stored its weights. It also ignores what only one commit records because a later
version of the code made it: a further value, or a column that the table got later.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from cairn.storage.ledger.commits import Commit, OutputFile, Step
from cairn.storage.ledger.publications import VALUE
from cairn.storage.ledger.schemas import ALL_MEASURED, SCHEMAS
from cairn.storage.ledger.snapshots import read_recorded_table, to_parquet
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


def compare(first: Commit, first_store: Store, second: Commit, second_store: Store) -> Comparison:
    """Compare two commits. Reads tables only if their digests differ. Raises Damaged."""
    retired: list[str] = []
    differences = [
        f"{field} is {getattr(first, field)} and {getattr(second, field)}"
        for field in _COMPARED
        if getattr(first, field) != getattr(second, field)
    ]
    common = (first.values.keys() & second.values.keys()) - {VALUE}
    first_values, second_values = ({name: commit.values[name] for name in common} for commit in (first, second))
    if first_values != second_values:
        differences.append(f"values is {first_values} and {second_values}")
    if first.step is Step.SYNC:  # its files follow from the digest among its values, whole or as a difference
        return Comparison(differences, retired)
    first_files, second_files = _files(first), _files(second)
    for name in sorted({*first_files, *second_files}):
        file, other = first_files.get(name), second_files.get(name)
        if file is None or other is None:
            differences.append(f"{name} is in only one of them")
        elif (file.content or file.sha256) != (other.content or other.sha256):
            if not name.endswith(_TABLE):
                differences.append(f"{name} has other bytes")
            elif file.rows != other.rows:
                differences.append(f"{name}: {file.rows} and {other.rows} rows")
            else:
                try:
                    tables = (
                        read_recorded_table(first_store, first.run, file),
                        read_recorded_table(second_store, second.run, other),
                    )
                except Retired as error:
                    retired.append(f"{name} has another digest, and its rows cannot be compared: {error}")
                    continue
                differences += [
                    f"{name}: {sentence}" for sentence in table_differences(*tables, SCHEMAS.get(first.step))
                ]
    return Comparison(differences, retired)


def table_differences(first: pa.Table, second: pa.Table, schema: pa.Schema | None = None) -> list[str]:
    """Return the differences between the values of two tables, in sentences.

    Ignores measured columns, and columns that one table lacks because it is older than their entry in the schema.
    """
    later = {field.name for field in schema or () if field.nullable}
    later &= {*first.column_names} ^ {*second.column_names}
    first, second = (table.select([n for n in table.column_names if n not in later]) for table in (first, second))
    if first.schema != second.schema:
        return ["the columns differ"]
    if first.num_rows != second.num_rows:
        return [f"{first.num_rows} and {second.num_rows} rows"]
    rows_by_column = {
        name: _differing_rows(first.column(name).to_pylist(), second.column(name).to_pylist())
        for name in first.column_names
        if name not in ALL_MEASURED
    }
    columns = [name for name, rows in rows_by_column.items() if rows]
    rows = sorted(set().union(*rows_by_column.values()))
    if not rows:
        # Values that Python calls equal may differ in bits, as 0 and -0 do; encoders of two versions differ in bytes.
        bits = [to_parquet(table.drop_columns([*ALL_MEASURED & {*table.column_names}])) for table in (first, second)]
        return [] if bits[0] == bits[1] else ["other bits for equal values"]
    return [f"{', '.join(columns)} differ in {len(rows)} of {first.num_rows} rows, first in row {rows[0]}"]


def _files(commit: Commit) -> dict[str, OutputFile]:
    """Return the files by their names in the attempt's folder."""
    return {output.path.partition(f"/{commit.attempt}/")[2]: output for output in commit.outputs}


def _differing_rows(first: Sequence[Any], second: Sequence[Any]) -> set[int]:
    # NaN is not equal to itself, but its repr is.
    return {row for row, (a, b) in enumerate(zip(first, second, strict=True)) if a != b and repr(a) != repr(b)}
