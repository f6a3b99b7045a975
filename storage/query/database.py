"""A query's database: DuckDB in memory, with the views that the query names, over the ledger's files and nothing else.

What a query may do is read: it is one SELECT, other files than those of the ledger are refused, and so are extensions
and changes of these settings.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import duckdb
import pyarrow as pa

from cairn.storage import layout
from cairn.storage.query.catalogue import Catalogue
from cairn.storage.query.errors import BadQuery
from cairn.storage.query.explain import plain_error
from cairn.storage.query.files import unreadable
from cairn.storage.query.names import names_in
from cairn.storage.query.relations import Relations, quoted
from cairn.storage.query.views import VIEWS
from cairn.storage.store import Store

_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "python_enable_replacements": "false",  # a name in a query is no variable of the caller's
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}


class Query:
    """A store as a database. Each query sees what is committed when it begins."""

    def __init__(self, store: Store, run: str | None = None):
        """Use `open_query`."""
        self.store = store
        self.run = run
        self.notes: tuple[str, ...] = ()
        """What the last query passed over, a sentence each."""

    def sql(self, text: str, params: Sequence[Any] | Mapping[str, Any] | None = None) -> pa.Table:
        """The result of a SELECT over the views. `params` are the values of its `?` or `$name`.

        Commits are not held against their digests, nor files: that is for `cairn verify`. A table that retention
        removed is left out; so is one that is lost or cannot be read, with a sentence in `notes`. Raises BadQuery.
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
                    newly = unreadable(self.store, relations.sizes) if _of_a_file(error) else {}
                    if not newly:
                        raise BadQuery(plain_error(error, views)) from error
                    lost |= newly
                    continue
            self.notes = (*catalogue.notes, *lost.values())
            return table


def open_query(store: Store, run: str | None = None) -> Query:
    """The database of a store, or of one run with what it shares with its parents. Raises FileNotFoundError if there
    is no such run."""
    if run is not None and not store.exists(layout.run_manifest(run)):
        raise FileNotFoundError(f"there is no run {run!r} in {store.url}; `cairn runs` lists them")
    return Query(store, run)


def _require_select(connection: duckdb.DuckDBPyConnection, text: str) -> None:
    """Raise BadQuery unless a text is one statement that reads."""
    statements = connection.extract_statements(text)
    if len(statements) != 1:
        raise BadQuery(f"give one SELECT; these are {len(statements)} statements")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise BadQuery(f"only SELECT reads the ledger; this is {statements[0].type.name}")


def _confine(connection: duckdb.DuckDBPyConnection, folders: Sequence[str]) -> None:
    """From here on only files below some folders can be read, and this cannot be changed."""
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET enable_progress_bar = false")  # it would stand in the command's output
    connection.execute(f"SET allowed_directories = [{', '.join(map(quoted, folders))}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _of_a_file(error: duckdb.Error) -> bool:
    """Whether a query may have failed by a file that is lost or damaged."""
    return not isinstance(error, duckdb.ParserException | duckdb.BinderException | duckdb.CatalogException)
