"""The database of a query: an in-memory DuckDB with the views that the query names, over the ledger's files.

A query can only read: it must be one SELECT. Other files, extensions and changes of these settings are rejected.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from cairn.storage.ledger import layout
from cairn.storage.query.catalogue import Catalogue
from cairn.storage.query.relations import Relations, quoted, unreadable
from cairn.storage.query.views import VIEWS
from cairn.storage.store.errors import BadQuery
from cairn.storage.store.store import Store

# DuckDB's errors reduced to one sentence, with suggestions for misspelled names.


_NO_COLUMN = re.compile(r'(?:column|named) "([^"]+)"')
_NO_TABLE = re.compile(r"Table with name (\S+) does not exist")


def plain_error(error: Exception, views: frozenset[str] = frozenset()) -> str:
    """Return what is wrong with a query, in one sentence. `views` are the views that it names."""
    first = str(error).strip().partition("\n")[0]
    text = re.sub(r"^\w+(?: \w+)? Error: ", "", first).rstrip("!. ")
    if match := _NO_TABLE.search(text):
        return f"there is no view {match[1]!r}{_nearest(match[1], VIEWS)}; `cairn sql --schema` lists the views"
    if match := _NO_COLUMN.search(text):
        columns = {column for view in views or VIEWS for column in VIEWS[view].columns}
        where = f" in {' or '.join(sorted(views))}" if views else ""
        if match[1] not in columns:
            return f"there is no column {match[1]!r}{where}{_nearest(match[1], columns)}; see `cairn sql --schema`"
    return text


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


# Names of the views and columns in a query, so that nothing else is built and read.


_WIDE = {"STAR", "NATURAL", "SHOW_REF", "PIVOT"}
"""Query nodes that may refer to every column."""


@dataclass(frozen=True)
class Names:
    """Names of the views and columns in a query; may include more."""

    views: frozenset[str]
    words: frozenset[str]
    """Lower-case words of the query, including those that are not columns."""
    wide: bool
    """Whether the query may refer to every column of its views."""

    def columns(self, view: str) -> list[str]:
        """Return the columns of a view to which the query may refer."""
        return [name for name in VIEWS[view].columns if self.wide or name in self.words]


def names_in(connection: duckdb.DuckDBPyConnection, text: str) -> Names:
    """Return the names in a query. Raises BadQuery if it cannot be parsed."""
    (answer,) = connection.execute("SELECT json_serialize_sql($1)", [text]).fetchall()[0]
    try:
        tree = json.loads(answer)
        if tree["error"]:
            raise BadQuery(tree["error_message"])
        nodes = list(_nodes(tree["statements"]))  # the rest of the tree has other names, such as `error`
    except RecursionError:
        raise BadQuery("the query is nested too deeply: write parts of it as WITH name AS (…)") from None
    words = frozenset(value.lower() for node in nodes for value in _texts(node))
    tables = {str(node[key]).lower() for node in nodes if "table_name" in node for key in ("table_name", "alias")}
    tables |= {str(node["alias"]).lower() for node in nodes if "subquery" in node and "alias" in node}
    columns = [node["column_names"] for node in nodes if node.get("class") == "COLUMN_REF"]
    rows = any(len(names) == 1 and names[0].lower() in tables for names in columns)
    wide = rows or any(node.get(key) in _WIDE for node in nodes for key in ("class", "type", "ref_type"))
    return Names(frozenset(words & VIEWS.keys()), words, wide)


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from _nodes(item)
    elif isinstance(value, list):
        for item in value:
            yield from _nodes(item)


def _texts(node: dict[str, Any]) -> Iterator[str]:
    for key, value in node.items():
        yield key  # some names of tables are keys of maps
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (item for item in value if isinstance(item, str))


_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "python_enable_replacements": "false",  # a name in a query must not refer to a variable of the caller
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}


class Query:
    """A store as a database. Each query sees what is committed when it starts."""

    def __init__(self, store: Store, run: str | None = None):
        """Do not call this directly; use `open_query`."""
        self.store = store
        self.run = run
        self.notes: tuple[str, ...] = ()
        """Sentences about what the last query skipped."""

    def sql(self, text: str, params: Sequence[Any] | Mapping[str, Any] | None = None) -> pa.Table:
        """Return the result of a SELECT over the views. Raises BadQuery.

        `params` are the values of its `?` or `$name`. Commits and files are not compared with their digests; `cairn
        verify` does that. A table that retention removed is left out. A table that is lost or cannot be read is left
        out, too, with a sentence in `notes`.
        """
        lost: dict[str, str] = {}
        while True:
            catalogue = Catalogue(self.store, self.run)
            relations = Relations(catalogue, without=lost, run=self.run)
            with closing(duckdb.connect(config=_SETTINGS)) as connection:
                views: frozenset[str] = frozenset()
                try:
                    _require_select(connection, text)
                    names = names_in(connection, text)
                    views = names.views
                    for view in sorted(views):
                        select = relations.select(VIEWS[view], names.columns(view))
                        relations.define(connection, select)
                        connection.execute(f"CREATE TEMP VIEW {view} AS {select}")
                    _confine(connection, relations.folders)
                    table = connection.sql(text, params=params).to_arrow_table()
                except duckdb.Error as error:
                    newly = unreadable(self.store, relations.sizes) if _may_be_file_error(error) else {}
                    if not newly:
                        raise BadQuery(plain_error(error, views)) from error
                    lost |= newly
                    continue
            self.notes = (*catalogue.notes, *lost.values())
            return table


def open_query(store: Store, run: str | None = None) -> Query:
    """Return the database of a store, or of one run with what it shares with its parents.

    Raises FileNotFoundError if there is no such run.
    """
    if run is not None and not store.exists(layout.run_manifest(run)):
        raise FileNotFoundError(f"there is no run {run!r} in {store.url}; `cairn runs` lists them")
    return Query(store, run)


def _require_select(connection: duckdb.DuckDBPyConnection, text: str) -> None:
    """Raise BadQuery unless the text is one statement that reads."""
    statements = connection.extract_statements(text)
    if len(statements) != 1:
        raise BadQuery(f"write one SELECT; these are {len(statements)} statements")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise BadQuery(f"only SELECT reads the ledger; this is {statements[0].type.name}")


def _confine(connection: duckdb.DuckDBPyConnection, folders: Sequence[str]) -> None:
    """Restrict the connection for good to reading files below these folders."""
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET enable_progress_bar = false")  # it would appear in the command's output
    connection.execute(f"SET allowed_directories = [{', '.join(map(quoted, folders))}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _may_be_file_error(error: duckdb.Error) -> bool:
    """Return whether a lost or damaged file may have caused the error."""
    return not isinstance(error, duckdb.ParserException | duckdb.BinderException | duckdb.CatalogException)
