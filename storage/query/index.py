"""What was read of a run's commits, kept between queries: reading thousands of small files takes longer than the rest.

```
<cache>/cairn/commits/<store>/<run>.arrow      an Arrow IPC file of `COMMITS`, and the SHA-256 of it
```

`<cache>` is `XDG_CACHE_HOME` or `~/.cache`, `<store>` a digest of its address, `<run>` the name and a digest of the
manifest. It is never the truth, and may be removed at any time: a file that is missing, torn or altered counts as none,
one that cannot be written is left out. What it says is used only for commits whose markers the store lists.
"""

import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from cairn.storage.manifest import Manifest
from cairn.storage.query.rows import COMMITS

_SHA256 = 32
_KEPT = 30 * 86400
"""Seconds for which an index that nobody uses is kept."""


def read_index(url: str, manifest: Manifest) -> pa.Table:
    """The commits that earlier queries read; none if there is no index that can be used."""
    path = _path(url, manifest)
    try:
        data = path.read_bytes()
        if hashlib.sha256(memoryview(data)[:-_SHA256]).digest() == data[-_SHA256:]:
            table = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(data).slice(0, len(data) - _SHA256))).read_all()
            if table.schema.equals(COMMITS):
                with suppress(OSError):
                    os.utime(path)
                return table
    except (OSError, pa.ArrowException):
        pass
    return COMMITS.empty_table()


def write_index(url: str, manifest: Manifest, table: pa.Table) -> None:
    """Keep commits for later queries, as far as that succeeds."""
    path = _path(url, manifest)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, COMMITS) as writer:
        writer.write_table(table.combine_chunks())
    data = sink.getvalue().to_pybytes()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(path) as temporary:
            temporary.write_bytes(data + hashlib.sha256(data).digest())
        _forget_unused(path.parent.parent)


def _path(url: str, manifest: Manifest) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    store = hashlib.sha256(url.encode()).hexdigest()[:16]
    return cache / "cairn" / "commits" / store / f"{manifest.run}-{manifest.identity[:16]}.arrow"


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _forget_unused(folder: Path) -> None:
    for file in folder.glob("*/*"):
        if time.time() - file.stat().st_mtime > _KEPT:
            file.unlink(missing_ok=True)
