"""Which views and columns a query names, so that nothing else is built and read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import duckdb

from cairn.storage.query.errors import BadQuery
from cairn.storage.query.views import VIEWS

_WIDE = {"STAR", "NATURAL", "SHOW_REF", "PIVOT"}
"""Parts of a query that may name every column there is."""


@dataclass(frozen=True)
class Names:
    """Every name of a view or column that stands in a query, and perhaps more."""

    views: frozenset[str]
    words: frozenset[str]
    """Lower-case; also those that are no columns."""
    wide: bool
    """Whether it may mean every column of its views."""

    def columns(self, view: str) -> list[str]:
        """Of a view, those that the query may name."""
        return [name for name in VIEWS[view].columns if self.wide or name in self.words]


def names_in(connection: duckdb.DuckDBPyConnection, text: str) -> Names:
    """The names in a query. Raises BadQuery where it cannot be parsed."""
    (answer,) = connection.execute("SELECT json_serialize_sql($1)", [text]).fetchall()[0]
    try:
        tree = json.loads(answer)
        if tree["error"]:
            raise BadQuery(tree["error_message"])
        nodes = list(_nodes(tree["statements"]))  # what stands around them has names of its own, such as `error`
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
        yield key  # the names of ordinary tables stand as keys of maps in places
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (item for item in value if isinstance(item, str))
