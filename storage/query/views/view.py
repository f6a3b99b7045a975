"""What a view is: a SELECT over the tables of one step, `base`, and joins.

A column's expression names the joins that it needs by their alias: a query's view is made of the columns that it names
and of their joins alone.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Column:
    """A column of a view."""

    type: str
    """Of DuckDB."""
    about: str
    sql: str


@dataclass(frozen=True)
class Twin:
    """A join that mostly has a row for each row of the base, and then can stand for it."""

    alias: str
    base: str
    columns: frozenset[str]
    """Of the base that the join has as well, with the same values."""


@dataclass(frozen=True)
class View:
    """A view of the ledger."""

    name: str
    about: str
    """What a row is."""
    base: str
    columns: Mapping[str, Column]
    joins: Mapping[str, str] = field(default_factory=dict)
    """By alias, in an order in which each needs those before it only."""
    anchor: str = ""
    """A column that makes the rows, and is always selected: the one that unnests."""
    twin: Twin | None = None

    def select(self, names: Collection[str], *, same_rows: bool = False) -> str:
        """The SELECT of some columns, in the view's order; one that is asked for none has its first. `same_rows`: the
        base and its twin have a row for each row of the other."""
        chosen = [name for name in self.columns if name in names or name == self.anchor] or [next(iter(self.columns))]
        items = ", ".join(f'{self.columns[name].sql} AS "{name}"' for name in chosen)
        joins: dict[str, str] = {}
        for alias, join in reversed(list(self.joins.items())):
            if re.search(rf"\b{alias}\.", " ".join([items, *joins.values()])):
                joins = {alias: join, **joins}
        if same_rows and self.twin is not None and self.twin.alias in joins:
            others = " ".join(join for alias, join in joins.items() if alias != self.twin.alias)
            if set(re.findall(r"\bb\.(\w+)", items + others)) <= self.twin.columns:
                renamed = re.sub(rf"\b{self.twin.alias}\.", "b.", items)
                return f"SELECT {renamed} FROM {self.twin.base} {others}"
        return f"SELECT {items} FROM {self.base} {' '.join(joins.values())}"


def column(type_: str, sql: str, about: str) -> Column:
    """In the order in which a view's columns read best."""
    return Column(type_, about, sql)


OF_RUN = {
    "run": column(
        "VARCHAR", "b.run", "the run; iterations that a fork shares stand under the fork and under its parent"
    ),
    "owner": column("VARCHAR", "b.owner", "the run that made it: `run = owner` counts each thing once"),
}
"""Columns of every view of what runs made."""


def time(name: str) -> str:
    """The expression of a column of `b` in seconds since the epoch."""
    return f"to_timestamp(b.{name})"
