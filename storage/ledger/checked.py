"""Committed tables of which a reader needs some columns first and others later."""

from collections.abc import Collection

import pyarrow as pa

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import OutputFile
from cairn.storage.ledger.schemas import SCHEMAS, complete
from cairn.storage.ledger.snapshots import from_parquet, read_bytes
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store


class CheckedTable:
    """The bytes of a committed table, which are read and checked once. Columns are decoded when they are needed."""

    def __init__(self, store: Store, run: str, output: OutputFile) -> None:
        """Read the file. Raises Damaged, naming the file, if it is missing or differs from what was committed, and
        Retired."""
        self._path = layout.in_run(run, output.path)
        self._data = read_bytes(store, run, output)
        place = layout.parse_file(run, self._path)
        self._schema = None if place is None else SCHEMAS.get(place[1])

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return len(self._data)

    def read(self, columns: Collection[str] | None = None) -> pa.Table:
        """Return the table, or those of some columns that it has. Columns that the step's schema got later are null."""
        try:
            table = from_parquet(self._data, columns)
        except ValueError as error:
            raise Damaged(f"{self._path} is not in Cairn's format: {error}") from error
        if self._schema is not None:
            table = complete(table, self._schema)
        return table if columns is None else table.select([name for name in table.column_names if name in columns])
