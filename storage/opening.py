"""Opening a store by its URL: local files or S3, with signatures if the environment names a key."""

import os
from urllib.parse import urlsplit

from cairn.storage.store.errors import StoreRefused
from cairn.storage.store.store import Store, probe


def open_store(url: str) -> Store:
    """Return the store at a local folder (made absolute if relative) or at `s3://bucket/prefix`.

    For S3, keys, region and endpoint come from the environment or the profile that AWS tools use (`AWS_ACCESS_KEY_ID`,
    `AWS_SECRET_ACCESS_KEY`, `AWS_PROFILE`, `AWS_ENDPOINT_URL`, …). Opens no connection.

    If `CAIRN_SIGNING_KEY` names a key, the store signs the ledger files that it creates (see
    `cairn.storage.upkeep.signatures`).
    """
    store = _open(url)
    key = os.environ.get("CAIRN_SIGNING_KEY")
    if not key:
        return store
    from cairn.storage.store.signed import read_key, signing

    return signing(store, read_key(key), open_store)


def _open(url: str) -> Store:
    scheme = urlsplit(url).scheme
    if scheme == "s3":
        from cairn.storage.store.s3 import S3Store  # s3fs takes a second to import

        return S3Store(url)
    if "://" in url:
        raise StoreRefused(f"store {scheme}://… is of an unknown kind; give a folder or s3://bucket/prefix")
    from cairn.storage.store.local import LocalStore

    return LocalStore(url)


def open_for_runs(url: str) -> Store:
    """Return the store at a folder or URL after a check that it can hold runs. Raises StoreRefused."""
    store = open_store(url)
    probe(store)
    return store
