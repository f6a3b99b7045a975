"""`cairn sql`: the ledger as a database."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from cairn.configs.errors import BadInput
from cairn.flows.cli.command import JsonOption, Root, Shown, bad_input
from cairn.flows.cli.printing import console, print_stderr
from cairn.flows.text import printable

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import RenderableType

_ROWS = 100
"""Rows of a table that are shown by default."""
_WIDE = 60
"""Characters of a column above which it is folded."""


def sql(
    root: Root,
    query: Annotated[
        str | None, Argument(metavar="QUERY", help="One SELECT over the views; `--schema` lists these.")
    ] = None,
    run: Annotated[
        str | None,
        Option("--run", metavar="RUN", help="Only this run, with the iterations that it shares with its parents."),
    ] = None,
    limit: Annotated[
        int | None, Option("--limit", metavar="N", min=1, help=f"At most N rows; {_ROWS} in a table, else all of them.")
    ] = None,
    schema: Annotated[bool, Option("--schema", help="List the views and their columns.")] = False,
    csv: Annotated[bool, Option("--csv", help="Print CSV, with lists and maps as JSON.")] = False,
    json: JsonOption = False,
) -> Shown:
    """Query the ledger with SQL.

    The views are `runs`, `steps`, `groups`, `samples`, `segments`, `calls`, `rewards`, `advantages`, `tokens`, `evals`,
    `evaluations` and `costs`. They show the ledger's commits and Parquet files, on local files and on S3. Nothing is
    copied, and nothing can be changed. Only the files that the query needs are read. The dialect is DuckDB's.

    Examples:

    - `cairn sql "SELECT iteration, avg(reward) FROM rewards WHERE run = 'quickstart' GROUP BY 1 ORDER BY 1"`
    - `cairn sql "SELECT reason, count(*) FROM groups WHERE disposition = 'drop' GROUP BY 1" --run quickstart`
    - `cairn sql "SELECT * FROM samples WHERE reward = 0" --limit 20 --json`
    - `cairn sql --schema`
    """
    if json and csv:
        raise BadInput("use --json or --csv, not both")
    if schema:
        return _schema()
    if query is None:
        raise BadInput('pass a query, as in `cairn sql "SELECT * FROM runs"`; `cairn sql --schema` lists the views')
    from cairn.storage.query.database import open_query
    from cairn.storage.store.errors import BadQuery

    with bad_input(FileNotFoundError, ValueError, BadQuery):
        database = open_query(root.store, run)
        found = database.sql(query)
    for note in database.notes:
        print_stderr(note)
    shown = found.slice(0, limit or (found.num_rows if json or csv else _ROWS))
    rows = _rows(shown)
    text = _csv(found.column_names, rows) if csv else _table(shown, rows, found.num_rows)
    return Shown([dict(zip(found.column_names, row, strict=True)) for row in rows], text)


def _rows(table: "pa.Table") -> list[list[Any]]:
    import pyarrow as pa

    columns = [
        [
            _plain(dict(value) if pa.types.is_map(column.type) and value is not None else value)
            for value in column.to_pylist()
        ]
        for column in table.columns
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _plain(value: Any) -> Any:
    """Return a value for JSON: maps as objects, times in ISO 8601, infinite and NaN floats as text, bytes in hex."""
    import datetime
    import decimal
    import math

    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _text(value: Any, null: str) -> str:
    from json import dumps

    if value is None:
        return null
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else dumps(value, ensure_ascii=False)


def _table(table: "pa.Table", values: Sequence[Sequence[Any]], total: int) -> "Iterator[RenderableType]":
    """Yield one row a line, or one value a line if that is too wide."""
    import pyarrow as pa
    from rich.table import Table
    from rich.text import Text

    names = [printable(name) for name in table.column_names]
    rows = [[printable(_text(value, "–")) for value in row] for row in values]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    if sum(min(width, _WIDE) + 3 for width in widths) > console().width:
        longest = max(map(len, names), default=0)
        for number, row in enumerate(rows):
            yield Text(f"row {number} ".ljust(80, "─"), "dim")
            for name, value in zip(names, row, strict=True):
                yield Text.assemble((name.ljust(longest + 3), "dim"), value)
    else:
        printed = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for name, field in zip(names, table.schema, strict=True):
            kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
            number = any(is_kind(field.type) for is_kind in kinds)
            printed.add_column(Text(name), justify="right" if number else "left", overflow="fold")
        for row in rows:
            printed.add_row(*map(Text, row))
        yield printed
    if table.num_rows < total:
        yield f"{table.num_rows} of {total} rows; --limit shows more"


def _csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([repr(value) if isinstance(value, float) else _text(value, "") for value in row])
    return out.getvalue().removesuffix("\n")


def _schema() -> Shown:
    from cairn.storage.query.views import VIEWS

    def tables() -> "Iterator[RenderableType]":
        from rich.table import Table

        for view in VIEWS.values():
            yield f"{view.name}: a row is {view.about}"
            table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 2), show_header=False)
            for name, column in view.columns.items():
                table.add_row(name, column.type, column.about)
            yield table
            yield ""

    value = {
        view.name: {
            "row": view.about,
            "columns": {name: {"type": column.type, "about": column.about} for name, column in view.columns.items()},
        }
        for view in VIEWS.values()
    }
    return Shown(value, tables())
