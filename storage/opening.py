"""Opening a store by its URL: local files or S3, with signatures if the environment names a key."""

import os
from urllib.parse import urlsplit

from cairn.storage.ledger.layout import ROOT_FOLDERS, RUNS
from cairn.storage.store.errors import StoreRefused
from cairn.storage.store.local import LocalStore
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
    return LocalStore(url)


def open_for_runs(url: str) -> Store:
    """Return the store at a folder or URL after a check that it can hold runs. Raises StoreRefused."""
    store = open_store(url)
    _require_not_inside_another(store)
    probe(store)
    return store


def open_existing(url: str, *, may_be_empty: bool = False) -> Store:
    """Return the store at a folder or URL, to read from. Raises StoreRefused where there is none, or, without
    `may_be_empty`, where nothing is stored."""
    store = open_store(url)
    store.check()
    if any(map(store.list, ROOT_FOLDERS)):
        return store
    _require_not_inside_another(store)
    if isinstance(store, LocalStore):
        below = [path.parent for path in store.root.glob("*/runs/") if LocalStore(str(path.parent)).list(RUNS)]
        if below:
            raise StoreRefused(f"{store.url} is not a store; did you mean the folder {below[0].name} in it?")
        if not store.root.is_dir():
            raise StoreRefused(f"there is no folder {store.url}; a store is the folder that contains runs/")
    if not may_be_empty:
        raise StoreRefused(f"{store.url} is not a store: it contains no runs/; `cairn train --store` makes one")
    return store


def _require_not_inside_another(store: Store) -> None:
    """Raise StoreRefused where the root is a folder of runs, or of a run, of another store."""
    root, slash, inside = store.url.rpartition(f"/{RUNS}")
    if slash and inside.count("/") < 2 and inside[:1] in ("", "/") and open_store(root or "/").list(RUNS):
        raise StoreRefused(f"{store.url} is inside a store; did you mean the folder above, {root or '/'}?")
