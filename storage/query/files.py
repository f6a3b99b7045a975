"""The ledger's files as DuckDB opens them: local ones by itself, those of an object store through `fsspec`."""

import io
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from cairn.storage.errors import StoreError
from cairn.storage.store import Store

SCHEME = "ledger"
_WHOLE = 2**20
"""Bytes of a file that is read by one request; of a larger one the parts that are needed are."""
_AT_A_TIME = 2**20
"""Bytes that a request for a part reads at least."""


class LedgerFiles(AbstractFileSystem):
    """`ledger://PATH` are the files of a store whose sizes are given; nothing else is there, and nothing is written."""

    protocol = SCHEME
    cachable = False

    def __init__(self, store: Store):
        super().__init__()
        self.store = store
        self.sizes: dict[str, int] = {}
        """Bytes by store path."""

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        if name not in self.sizes:
            raise FileNotFoundError(path)
        return {"name": name, "size": self.sizes[name], "type": "file"}

    def modified(self, path: str) -> datetime:
        """Committed files never change."""
        return datetime.fromtimestamp(0, UTC)

    def glob(self, path: str, **_: Any) -> list[str]:
        name = self._strip_protocol(path)
        return [name] if name in self.sizes else []

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode != "rb":
            raise PermissionError(f"{path} is only read")
        name = self._strip_protocol(path)
        if self.info(path)["size"] <= _WHOLE:
            return io.BytesIO(self.store.read(name))
        return _Part(self, name, size=self.sizes[name], block_size=_AT_A_TIME, cache_type="readahead")


class _Part(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.store.read_range(self.path, start, min(end, self.size))


def unreadable(store: Store, sizes: Mapping[str, int]) -> dict[str, str]:
    """Those of the files that are lost or no Parquet files, with a sentence of what is wrong."""
    found = {}
    for path, size in sizes.items():
        try:
            tail = store.read_range(path, max(0, size - 8), size)
            length = int.from_bytes(tail[:4], "little")
            if tail[4:] != b"PAR1" or length + 8 > size:
                raise ValueError("it ends otherwise than a Parquet file")
            pq.read_schema(pa.BufferReader(b"PAR1" + store.read_range(path, size - 8 - length, size)))
        except FileNotFoundError:
            found[path] = f"{path} is committed but missing; it is left out, see `cairn verify`"
        except (ValueError, OSError, pa.ArrowException, StoreError) as error:
            found[path] = f"{path} cannot be read ({error!s:.100}); it is left out, see `cairn verify`"
    return found
