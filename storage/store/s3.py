"""A store on an S3-compatible object store, through s3fs.

Exclusive creation is a PUT with `If-None-Match: *`. Stores report an existing object differently (412, 409 or 400), and
a response may be lost after the object was created. So after any failure the object is read again: the creator is the
caller whose bytes it holds.

botocore retries a request after transient failures (5xx, throttling, timeouts, broken connections). An operation that
still fails, or whose body was cut off, is retried here until `RETRY_DEADLINE` is exhausted. Only this module retries a
creation, after calling its guard. All retries are counted, except the second connection that aiohttp opens at once if
one breaks without a response.
"""

import base64
import builtins
import hashlib
import itertools
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import s3fs
from aiohttp import ClientError as BrokenConnection
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from cairn.storage.store.errors import NoSpace, StoreError, StoreRefused, naming_full
from cairn.storage.store.store import Unfinished, check_path, is_path

# Translation of object store errors into store errors that say what to change.


REQUEST_ERRORS = (OSError, BotoCoreError, ClientError, BrokenConnection, ResponseParserError)
"""Errors that s3fs raises."""

KEYS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE)"
_REGION = "the bucket is in another region; set AWS_REGION to it"
_REFUSALS = {
    "InvalidAccessKeyId": f"the access key is unknown; {KEYS}",
    "SignatureDoesNotMatch": f"the secret key is wrong; {KEYS}",
    "ExpiredToken": "the session token has expired; log in again",
    "InvalidToken": "the session token is not valid; log in again",
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it",
    "NoSuchBucket": "there is no such bucket; create it or name another",
    "InvalidBucketName": "the bucket's name is not valid; name another",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "QuotaExceeded": "its quota is used up; free some space or raise it",
    "XMinioStorageFull": "no space is left there; free some",
}
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull"})
_FULL_STATUS = 507
_REFUSED_STATUS = {
    401: f"access is denied; {KEYS}",
    403: f"access is denied; {KEYS} and the bucket's policy",
    _FULL_STATUS: "no space is left there; free some",
}
_MOMENTARY = {"RequestTimeout", "IncompleteBody", "BadDigest", "PreconditionFailed", "ConditionalRequestConflict"}
_MOMENTARY_STATUS = {400, 408, 409, 412, 429}


def as_store_error(error: Exception, url: str, path: str) -> Exception:
    """Return the store error for an error of a request to the store at `url`.

    The message never quotes the server, whose text may contain what the request sent.
    """
    reply = error if isinstance(error, ClientError) else error.__cause__
    if isinstance(reply, ClientError):
        code = reply.response.get("Error", {}).get("Code", "")
        status = reply.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in _REFUSALS:
            return (NoSpace if code in _FULL else StoreRefused)(f"store {url} cannot be used: {_REFUSALS[code]}")
        if status == 404:
            return FileNotFoundError(f"{url} has no {path}")
        if status in _REFUSED_STATUS:
            return (NoSpace if status == _FULL_STATUS else StoreRefused)(
                f"store {url} cannot be used: {_REFUSED_STATUS[status]}"
            )
        if code in _MOMENTARY or status in _MOMENTARY_STATUS or status >= 500:
            return StoreError(f"store {url} failed at {path}: HTTP {status} {code}")
        return StoreRefused(f"store {url} refuses {path}: HTTP {status} {code}")
    if isinstance(error, SSLError):
        return StoreRefused(f"store {url} cannot be used: its certificate is not valid")
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return StoreRefused(f"store {url} cannot be used: there are no keys; {KEYS}")
    if isinstance(error, HTTPClientError | NoConnection | OSError | BrokenConnection | ResponseParserError):
        return StoreError(f"store {url} does not respond at {path}: {type(error).__name__}")
    return StoreRefused(f"store {url} cannot be used: {error}")


T = TypeVar("T")

RETRY_DEADLINE = 60.0
"""Seconds for which an operation is retried before it fails: longer than a store's restart."""
_REQUEST_ATTEMPTS = 4
"""Times that botocore sends one request. Its waits add up to at most 7 s."""
_CONNECT_TIMEOUT, _READ_TIMEOUT = 5, 30
_CONNECTIONS = 32
_CHUNK = 16 * 2**20
"""Bytes of one part of a large file, for uploads and downloads."""
_PARTS_AT_A_TIME = 4
_MOST_PARTS = 5_000
"""Greatest number of parts of an upload; S3 allows 10,000."""
_MOST_DELETED = 1_000
"""Greatest number of objects that one request deletes."""
_LARGEST_MARKER = 5 * 2**20
"""Greatest number of bytes of a created file. It must fit into one PUT, because stores ignore the condition on
multipart uploads."""


def _names(page: dict[str, Any], prefix: str) -> Iterator[str]:
    found = [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
    found += [entry["Key"] for entry in page.get("Contents", [])]
    yield from (name for key in found if is_path((name := key.removeprefix(prefix)).removesuffix("/")))


class _RetryRefused(OSError):
    """Stops botocore's retry of a conditional PUT."""


def _send_a_creation_once(request: Any, **_: Any) -> None:
    """Raise _RetryRefused if botocore retries a creation, because botocore does not call the guard before a retry."""
    attempt = re.search(r"attempt=(\d+)", str(request.headers.get("amz-sdk-request", "")))
    if "If-None-Match" in request.headers and attempt is not None and int(attempt[1]) > 1:
        raise _RetryRefused("only the creator may retry a creation")


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    """Add the digest that S3's older versions, and many compatible stores, require where botocore adds another one."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


class _Retries:
    """Counter of retried requests and operations.

    It is separate from the store: the S3 client refers to its event handlers, and it is closed only when nothing refers
    to its store.
    """

    def __init__(self) -> None:
        self.count = 0
        self._adding = threading.Lock()

    def add(self, count: int = 1) -> None:
        with self._adding:
            self.count += count

    def add_requests(self, context: dict[str, Any], exception: Exception | None = None, **_: Any) -> None:
        """Count the requests that botocore sent more than once, when a call has ended."""
        sent = context["retries"]["attempt"] - isinstance(exception, _RetryRefused)
        self.add(sent - 1)


class S3Store:
    """A `cairn.storage.store.store.Store` on S3."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        if "@" in url or ":" in parts.netloc or parts.query:  # keys may hold slashes: then they look like a path
            raise StoreRefused(f"a store's address must not contain keys; {KEYS}")
        if parts.scheme != "s3" or not parts.netloc or parts.fragment:
            raise StoreRefused(f"store {parts.scheme}://{parts.netloc}… is not of the form s3://bucket/prefix")
        self._bucket = parts.netloc
        prefix = parts.path.strip("/")
        self._prefix = f"{check_path(prefix)}/" if prefix else ""
        self.url = f"s3://{self._bucket}/{prefix}".rstrip("/")
        self._retries = _Retries()
        self._connecting = threading.Lock()
        self._connection: s3fs.S3FileSystem | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"])  # type: ignore[misc]

    @property
    def retries(self) -> int:
        return self._retries.count

    def check(self) -> None:
        try:
            where = {"Bucket": self._bucket, "Prefix": self._prefix, "MaxKeys": 1}
            self._call(self._prefix, self._s3.call_s3, "list_objects_v2", **where)
        except StoreRefused:
            raise
        except StoreError as error:
            raise StoreRefused(f"{error}; check AWS_ENDPOINT_URL and the network") from None

    def read(self, path: str) -> bytes:
        return self._retrying(lambda: self._get(path))

    def read_many(self, paths: Sequence[str]) -> builtins.list[bytes | None]:
        def read(path: str) -> bytes | None:
            try:
                return self.read(path)
            except FileNotFoundError:
                return None

        with ThreadPoolExecutor(_CONNECTIONS) as readers:
            return [*readers.map(read, paths)]

    def read_range(self, path: str, start: int, end: int) -> bytes:
        part = {"start": start, "end": end}
        data: bytes = self._request(path, self._s3.cat_file, self._full(path), **part)
        return data

    def write(self, path: str, data: bytes) -> None:
        self._request(path, self._s3.pipe_file, self._full(path), data)

    def create(self, path: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
        if not 0 < len(data) <= _LARGEST_MARKER:
            raise ValueError(f"cannot create {path} from {len(data)} bytes: the size must be 1 to {_LARGEST_MARKER}")

        def create_once() -> bool:
            guard()
            try:
                self._call(path, self._s3.pipe_file, self._full(path), data, mode="create")
                return True
            except StoreError as refusal:
                try:
                    return self._get(path) == data
                except FileNotFoundError:
                    raise refusal from None

        return self._retrying(create_once)

    def exists(self, path: str) -> bool:
        try:
            self._size(path)
            return True
        except FileNotFoundError:
            return False

    def page(self, folder: str, after: str) -> tuple[list[str], bool]:
        prefix = self._key(folder) + "/"
        page = next(self._pages(prefix, Delimiter="/", StartAfter=prefix + after))
        return sorted(name for name in _names(page, prefix) if name > after), bool(page.get("IsTruncated"))

    def find(self, folder: str) -> dict[str, int]:
        prefix, root = self._key(folder) + "/", len(self._prefix)
        pages = self._pages(prefix)
        sizes = {entry["Key"][root:]: entry["Size"] for page in pages for entry in page.get("Contents", [])}
        return {path: size for path, size in sizes.items() if is_path(path)}

    def delete(self, path: str) -> None:
        self._request(path, self._s3.call_s3, "delete_object", Bucket=self._bucket, Key=self._key(path))

    def delete_many(self, paths: Sequence[str]) -> None:
        for first in range(0, len(paths), _MOST_DELETED):
            some = paths[first : first + _MOST_DELETED]
            self._retrying(partial(self._delete_once, some))

    def _delete_once(self, paths: Sequence[str]) -> None:
        objects = {"Objects": [{"Key": self._key(path)} for path in paths], "Quiet": True}
        response = self._call(paths[0], self._s3.call_s3, "delete_objects", Bucket=self._bucket, Delete=objects)
        for failed in response.get("Errors", []):
            raise StoreError(f"store {self.url} did not delete {failed.get('Key')}: {failed.get('Code')}")

    def unfinished(self, folder: str) -> list[Unfinished]:
        found: list[Unfinished] = []
        where = {"Bucket": self._bucket, "Prefix": self._key(folder) + "/"}
        while True:
            page = self._request(folder, self._s3.call_s3, "list_multipart_uploads", **where)
            for upload in page.get("Uploads", []):
                path, began = upload["Key"][len(self._prefix) :], upload["Initiated"].timestamp()
                found.append(Unfinished(path, None, began, upload["UploadId"]))
            if not page.get("IsTruncated"):
                return found
            where |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def list(self, folder: str) -> list[str]:
        prefix = self._key(folder) + "/"
        return sorted(name for page in self._pages(prefix, Delimiter="/") for name in _names(page, prefix))

    def discard(self, unfinished: Unfinished) -> None:
        where = {"Bucket": self._bucket, "Key": self._key(unfinished.path), "UploadId": unfinished.upload}
        with suppress(FileNotFoundError):
            self._request(unfinished.path, self._s3.call_s3, "abort_multipart_upload", **where)

    def remove_empty_folders(self, folder: str) -> None:
        pass

    def sha256(self, path: str) -> tuple[int, str]:
        digest, size = hashlib.sha256(), 0
        for chunk in self._chunks(path):
            digest.update(chunk)
            size += len(chunk)
        return size, digest.hexdigest()

    def put_file(self, local: Path, path: str) -> None:
        parts = {"chunksize": max(_CHUNK, local.stat().st_size // _MOST_PARTS), "max_concurrency": _PARTS_AT_A_TIME}
        self._request(path, self._s3.put_file, str(local), self._full(path), **parts)

    def get_file(self, path: str, local: Path) -> None:
        with naming_full(local.parent):
            descriptor, temporary = tempfile.mkstemp(dir=local.parent, prefix=".", suffix=".tmp")
        try:
            with naming_full(local.parent), open(descriptor, "wb") as file:
                for chunk in self._chunks(path):
                    file.write(chunk)
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, local)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    @property
    def _s3(self) -> s3fs.S3FileSystem:
        with self._connecting:
            if self._connection is None:
                self._connection = self._connect()
            return self._connection

    def _connect(self) -> s3fs.S3FileSystem:
        connection = s3fs.S3FileSystem(
            use_listings_cache=False,
            skip_instance_cache=True,
            config_kwargs={
                "connect_timeout": _CONNECT_TIMEOUT,
                "read_timeout": _READ_TIMEOUT,
                "max_pool_connections": _CONNECTIONS,
                "retries": {"mode": "standard", "total_max_attempts": _REQUEST_ATTEMPTS},
                # Stores other than AWS reject the checksum trailers that botocore adds by default.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        )
        connection.retries = 1  # s3fs's own retries would multiply botocore's, uncounted
        try:
            connection.connect()
        except BotoCoreError as error:
            raise StoreRefused(f"store {self.url} cannot be opened: {error}") from None
        except ValueError:  # its text quotes the URL, which may contain keys
            raise StoreRefused(f"store {self.url} cannot be opened: AWS_ENDPOINT_URL is not a valid URL") from None
        for event in ("after-call.s3", "after-call-error.s3"):
            connection.s3.meta.events.register(event, self._retries.add_requests)
        connection.s3.meta.events.register("before-send.s3.PutObject", _send_a_creation_once)
        connection.s3.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
        return connection

    def _key(self, path: str) -> str:
        return self._prefix + check_path(path)

    def _full(self, path: str) -> str:
        return f"{self._bucket}/{self._key(path)}"

    def _get(self, path: str) -> bytes:
        # With one connection s3fs sends one GET; with more it first requests the size.
        return self._call(path, self._s3.cat_file, self._full(path), max_concurrency=1)

    def _size(self, path: str) -> int:
        head = self._request(path, self._s3.call_s3, "head_object", Bucket=self._bucket, Key=self._key(path))
        size: int = head["ContentLength"]
        return size

    def _chunks(self, path: str) -> Iterator[bytes]:
        """Yield a file's bytes in order, prefetched by a few ranged requests."""
        size = self._size(path)

        def read(start: int) -> bytes:
            return self.read_range(path, start, min(start + _CHUNK, size))

        with ThreadPoolExecutor(_PARTS_AT_A_TIME) as readers:
            starts = iter(range(0, size, _CHUNK))
            while window := list(itertools.islice(starts, _PARTS_AT_A_TIME)):
                yield from readers.map(read, window)

    def _pages(self, prefix: str, **options: Any) -> Iterator[dict[str, Any]]:
        where = {"Bucket": self._bucket, "Prefix": prefix, **options}
        while True:
            page = self._request(prefix, self._s3.call_s3, "list_objects_v2", **where)
            yield page
            if not page.get("IsTruncated"):
                return
            where["ContinuationToken"] = page["NextContinuationToken"]

    def _retrying(self, operation: Callable[[], T]) -> T:
        return Retrying(
            retry=retry_if_exception(lambda e: isinstance(e, StoreError) and not isinstance(e, StoreRefused)),
            stop=stop_after_delay(RETRY_DEADLINE),
            wait=wait_random_exponential(multiplier=0.1, max=10),
            before_sleep=lambda _: self._retries.add(),
            reraise=True,
        )(operation)

    def _request(self, path: str, request: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a request like `_call`, and retry it."""
        return self._retrying(lambda: self._call(path, request, *args, **kwargs))

    def _call(self, path: str, request: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a request once, with store errors in place of the client's."""
        try:
            return request(*args, **kwargs)
        except REQUEST_ERRORS as error:
            raise as_store_error(error, self.url, path) from None
