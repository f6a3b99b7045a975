"""`cairn.open`: access to a store from Python code, by views, by SQL and by the lineage of single samples."""

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cairn.storage.opening import open_existing
from cairn.storage.query.database import open_query
from cairn.storage.query.views import VIEWS

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa

    from cairn.flows.reading.lineage import Lineage


class ViewOf:
    """A view of docs/views.md in one store. Nothing is read before a method is called."""

    def __init__(self, store: "OpenedStore", name: str):
        self._store = store
        self.name = name

    def arrow(self, where: str = "true", params: Sequence[Any] | Mapping[str, Any] | None = None) -> "pa.Table":
        """Return the rows that satisfy `where`, a condition in SQL, as a pyarrow table. `params` are the values of its
        `?` or `$name`. Raises cairn.BadQuery."""
        return self._store.sql(f"SELECT * FROM {self.name} WHERE {where}", params)

    def pandas(
        self, where: str = "true", params: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> "pandas.DataFrame":
        """Return the rows of `arrow` as a pandas data frame; pandas must be installed."""

        return self.arrow(where, params).to_pandas(maps_as_pydicts="strict")

    def polars(
        self, where: str = "true", params: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> "polars.DataFrame":
        """Return the rows of `arrow` as a Polars data frame, maps as lists of key and value; Polars must be
        installed."""
        import polars
        import pyarrow as pa

        table = self.arrow(where, params)
        for at, field in enumerate(table.schema):
            if pa.types.is_map(field.type):
                entry = pa.struct([("key", field.type.key_type), ("value", field.type.item_type)])
                table = table.set_column(at, field.name, table.column(at).cast(pa.list_(entry)))
        frame = polars.from_arrow(table)
        assert isinstance(frame, polars.DataFrame)
        return frame

    def __repr__(self) -> str:
        columns = "\n".join(f"  {name}: {column.type}" for name, column in VIEWS[self.name].columns.items())
        return f"{self.name}: a row is {VIEWS[self.name].about}\n{columns}"


class OpenedStore:
    """Read access to all runs of a store. Holds no open resources.

    Each view of docs/views.md is an attribute: `store.samples.pandas("reward = 0")`.
    """

    runs: ViewOf
    steps: ViewOf
    groups: ViewOf
    samples: ViewOf
    segments: ViewOf
    calls: ViewOf
    rewards: ViewOf
    advantages: ViewOf
    tokens: ViewOf
    evals: ViewOf
    evaluations: ViewOf
    costs: ViewOf

    def __init__(self, url: str):
        """Do not call this directly; use `cairn.open`."""
        self.store = open_existing(url)
        for name in VIEWS:
            setattr(self, name, ViewOf(self, name))

    def __repr__(self) -> str:
        return f"cairn.open({self.store.url!r})"

    def sql(self, text: str, params: Sequence[Any] | Mapping[str, Any] | None = None) -> "pa.Table":
        """Return the result of a SELECT over the views of docs/sql.md, as a pyarrow table.

        Its `.to_pylist()`, `.column(name)` and, where pandas is installed, `.to_pandas()` convert it further. `params`
        are the values of the query's `?` or `$name`. Warns about files that cannot be read. Raises cairn.BadQuery.
        """
        query = open_query(self.store)
        table = query.sql(text, params)
        for note in query.notes:
            warnings.warn(note, stacklevel=2)
        return table

    def lineage(
        self, run: str, iteration: int, group_id: int, sample_index: int, token: int | None = None
    ) -> "Lineage":
        """Return the origin and the use of a sample; see `cairn.flows.reading.lineage`. Raises FileNotFoundError if
        there is no such run and LookupError if it has no such sample."""
        from cairn.flows.reading.lineage import lineage
        from cairn.storage.ledger.ledger import Ledger

        return lineage(Ledger.open(self.store, run), iteration, group_id, sample_index, token)


def opened(url: str | os.PathLike[str] | None = None) -> OpenedStore:
    """Return the store at a folder or `s3://bucket/prefix`; by default that of `CAIRN_STORE`, else the working folder.

    For S3 it uses the credentials that AWS tools use. Raises `cairn.storage.store.errors.StoreRefused` if there is no
    store, or it does not respond.
    """
    return OpenedStore(os.fspath(url) if url is not None else os.environ.get("CAIRN_STORE") or ".")
