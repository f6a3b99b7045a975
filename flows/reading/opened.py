"""`cairn.open`: access to a store from Python code, by SQL and by the lineage of single samples."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cairn.storage.opening import open_store
from cairn.storage.query.database import open_query

if TYPE_CHECKING:
    import pyarrow as pa

    from cairn.flows.reading.lineage import Lineage


class OpenedStore:
    """Read access to all runs of a store. Holds no open resources."""

    def __init__(self, url: str):
        """Do not call this directly; use `cairn.open`."""
        self.store = open_store(url)
        self.store.check()

    def sql(self, text: str, params: Sequence[Any] | Mapping[str, Any] | None = None) -> "pa.Table":
        """Return the result of a SELECT over the views of docs/sql.md, as a pyarrow table.

        Its `.to_pylist()`, `.column(name)` and, where pandas is installed, `.to_pandas()` convert it further. `params`
        are the values of the query's `?` or `$name`. Raises cairn.BadQuery.
        """
        return open_query(self.store).sql(text, params)

    def lineage(
        self, run: str, iteration: int, group_id: int, sample_index: int, token: int | None = None
    ) -> "Lineage":
        """Return the origin and the use of a sample; see `cairn.flows.reading.lineage`. Raises FileNotFoundError if
        there is no such run and LookupError if it has no such sample."""
        from cairn.flows.reading.lineage import lineage
        from cairn.storage.ledger.ledger import Ledger

        return lineage(Ledger.open(self.store, run), iteration, group_id, sample_index, token)


def opened(url: str = ".") -> OpenedStore:
    """Return the store at a folder or `s3://bucket/prefix`, with the credentials that AWS tools use. Raises
    `cairn.storage.store.errors.StoreRefused` if it does not respond."""
    return OpenedStore(url)
