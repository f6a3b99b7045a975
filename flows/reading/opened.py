"""`cairn.open`: a store as Python code asks it, by SQL and by the origin of single samples."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cairn.storage.opening import open_store
from cairn.storage.query.database import open_query

if TYPE_CHECKING:
    import pyarrow as pa

    from cairn.flows.reading.lineage import Lineage


class OpenedStore:
    """All runs of a store, to be read. Keeps nothing open."""

    def __init__(self, url: str):
        """Use `cairn.open`."""
        self.store = open_store(url)
        self.store.check()

    def sql(self, text: str, params: Sequence[Any] | Mapping[str, Any] | None = None) -> "pa.Table":
        """The result of a SELECT over the views of docs/sql.md, as a pyarrow table: `.to_pylist()` and `.column(name)`
        lead on, and `.to_pandas()` where pandas is installed. `params` are the values of its `?` or `$name`.
        Raises cairn.BadQuery."""
        return open_query(self.store).sql(text, params)

    def lineage(
        self, run: str, iteration: int, group_id: int, sample_index: int, token: int | None = None
    ) -> "Lineage":
        """Where a sample came from and what it went into; see `cairn.flows.reading.lineage`. Raises FileNotFoundError
        if there is no such run and LookupError if it has no such sample."""
        from cairn.flows.reading.lineage import lineage
        from cairn.storage.ledger.ledger import Ledger

        return lineage(Ledger.open(self.store, run), iteration, group_id, sample_index, token)


def opened(url: str = ".") -> OpenedStore:
    """The store at a folder or `s3://bucket/prefix`, with the keys that AWS tools use. Raises
    `cairn.storage.store.errors.StoreRefused` if it does not answer."""
    return OpenedStore(url)
