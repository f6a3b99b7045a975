"""Counts of the requests that every process of a run makes to its store, and of the bytes that it writes.

Linked into a folder of PYTHONPATH as `sitecustomize.py`, this file runs at the start of each Python process. Where
`CAIRN_BENCH_COUNTS` names a folder, it wraps the stores' classes when they are imported. Each process counts in a file
of its own there, so that counts survive a process that is killed. `read` sums the files.

A request of an object store is one HTTP request, retries included, as its client creates it. A call of a store on local
files counts as the requests that an object store would need for it.
"""

import importlib.abc
import importlib.util
import mmap
import os
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

FOLDER = "CAIRN_BENCH_COUNTS"

_ROW = struct.Struct("=64sqq")
"""`operation object`, number of requests, and bytes written."""
_ROWS = 512

_LOCAL = {
    "read": "GET", "read_range": "GET", "get_file": "GET", "sha256": "GET", "read_many": "GET",
    "write": "PUT", "create": "PUT", "put_file": "PUT",
    "exists": "HEAD", "delete": "DELETE",
    "list": "LIST", "page": "LIST", "find": "LIST", "unfinished": "LIST",
}  # fmt: skip
"""Operation of an object store by method of a store on local files. Other methods make no request."""

_S3 = {
    "GetObject": "GET", "HeadObject": "HEAD", "ListObjectsV2": "LIST", "ListObjects": "LIST",
    "DeleteObject": "DELETE", "DeleteObjects": "DELETE", "ListMultipartUploads": "LIST", "ListParts": "LIST",
    "PutObject": "PUT", "UploadPart": "PUT", "CreateMultipartUpload": "PUT", "CompleteMultipartUpload": "PUT",
}  # fmt: skip

_OBJECTS = [
    (re.compile(pattern), name)
    for pattern, name in [
        (r"leases(/|$)", "lease"),
        (r"iterations/\d{6}/[a-z]+(\.[^/]*)?\.json$", "commit"),
        (r"iterations/\d{6}/[^/]+\.json$", "commit"),
        (r"iterations/\d{6}/([a-z]+)/[^/]+/.*write_ahead", "write-ahead"),
        (r"iterations/\d{6}/[a-z]+/[^/]+/.*\.parquet$", "snapshot"),
        (r"iterations/\d{6}/checkpoint", "checkpoint"),
        (r"iterations/\d{6}", "iteration"),
        (r"stream/", "write-ahead"),
        (r"(iterations|decisions|upgrades|retired)(/|$)", "run"),
        (r"runs/[^/]+/run\.json$", "run"),
    ]
]


def object_of(path: str) -> str:
    """Return the kind of object that a store's path names."""
    return next((name for pattern, name in _OBJECTS if pattern.search(path)), "other")


class _Counts:
    """Counts of this process. Thread-safe; a fork counts in a file of its own."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._pid = 0
        self._file: mmap.mmap | None = None
        self._rows: dict[str, list[int]] = {}

    def add(self, operation: str, path: str, written: int = 0, count: int = 1) -> None:
        name = f"{operation} {object_of(path)}"
        with self._lock:
            if self._pid != os.getpid():
                self._open()
            assert self._file is not None
            row = self._rows.setdefault(name, [len(self._rows), 0, 0])
            row[1] += count
            row[2] += written
            _ROW.pack_into(self._file, row[0] * _ROW.size, name.encode(), row[1], row[2])

    def _open(self) -> None:
        self._pid, self._rows = os.getpid(), {}
        descriptor = os.open(f"{self._folder}/{self._pid}.counts", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.truncate(descriptor, _ROWS * _ROW.size)
        self._file = mmap.mmap(descriptor, _ROWS * _ROW.size)
        os.close(descriptor)


def read(folder: Path) -> dict[int, dict[str, tuple[int, int]]]:
    """Return (requests, bytes written) by `operation object` so far, of each process by its pid."""
    return {int(path.stem): dict(_rows(path.read_bytes())) for path in folder.glob("*.counts")}


def _rows(data: bytes) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, count, written in _ROW.iter_unpack(data):
        if count:
            yield name.rstrip(b"\0").decode(), (count, written)


# Wrapping of the classes.


def _count_local(counts: _Counts, store: type) -> None:
    """Count the calls of a `LocalStore` that come from outside of it."""
    inside = threading.local()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, path: str | Sequence[str] = "", *args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "now", False):
                return method(self, path, *args, **kwargs)
            inside.now = True
            try:
                return method(self, path, *args, **kwargs)
            finally:
                inside.now = False
                if name == "read_many":
                    for one in path:
                        counts.add(_LOCAL[name], one)
                elif name == "put_file":
                    counts.add(_LOCAL[name], args[0], os.path.getsize(str(path)))
                else:
                    written = len(args[0]) if name in ("write", "create") else 0
                    counts.add(_LOCAL[name], str(getattr(path, "path", path)), written)

        return call

    for name in _LOCAL:
        if hasattr(store, name):
            setattr(store, name, counted(name, getattr(store, name)))


def _count_s3(counts: _Counts, store: Any) -> None:
    """Count the HTTP requests of an `S3Store`."""
    connect = store._connect

    def add(request: Any, operation_name: str, **_: Any) -> None:
        size = 0
        if operation_name in ("PutObject", "UploadPart"):
            size = len(request.data) if isinstance(request.data, bytes | bytearray) else _size(request.data)
        url = urlsplit(request.url)
        where = {**parse_qs(url.query), **{name: [value] for name, value in dict(request.params or {}).items()}}
        counts.add(_S3.get(operation_name, operation_name), where.get("prefix", [url.path])[0], size)

    def counting(self: Any) -> Any:
        connection = connect(self)
        connection.s3.meta.events.register("request-created.s3", add)
        return connection

    store._connect = counting


def _size(body: Any) -> int:
    if not hasattr(body, "seek"):
        return 0
    at = body.tell()
    end = body.seek(0, os.SEEK_END)
    body.seek(at)
    return int(end) - int(at)


class _Wrapping(importlib.abc.MetaPathFinder):
    """Wraps the stores' classes as their modules are imported."""

    def __init__(self, counts: _Counts) -> None:
        self._wrap = {
            "cairn.storage.store.local": lambda module: _count_local(counts, module.LocalStore),
            "cairn.storage.store.s3": lambda module: _count_s3(counts, module.S3Store),
        }

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        wrap = self._wrap.pop(name, None)
        if wrap is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def loaded(module: Any) -> None:
            load(module)
            wrap(module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


if os.environ.get(FOLDER) and __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Wrapping(_Counts(os.environ[FOLDER])))
