"""Stores that sign the ledger files that they create. `cairn.storage.upkeep.signatures` says what signatures
promise."""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from cairn.storage.store import canonical
from cairn.storage.store.errors import StoreRefused
from cairn.storage.store.store import Store

if TYPE_CHECKING:
    from cairn.storage.store.local import LocalStore as _AnyStore
else:
    _AnyStore = object

_CONTEXT = "cairn ledger 1"
"""Prefix of every signed message, so that a signature made for another purpose is not valid here."""
_SIGNED = ("runs/", "evals/")
_PART = re.compile(r"(?:/write_ahead/|^answers/)(?:.*[./])?([0-9a-f]{64})\.arrow$")
_DIGITS = 16
"""Characters of a digest in the name of a signature."""


def new_key(file: Path) -> str:
    """Write a new private key that only its owner can read. Return the public key in hex. Raises FileExistsError."""
    key = Ed25519PrivateKey.generate()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return public_key(key)


def public_key(key: Ed25519PrivateKey) -> str:
    """Return the public key in hex."""
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def read_key(file: str) -> Ed25519PrivateKey:
    """Return the private key in a file. Raises StoreRefused, which names the file but none of its content."""
    try:
        key = load_pem_private_key(Path(file).expanduser().read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise StoreRefused(
            f"CAIRN_SIGNING_KEY names {file}, which is not a readable private key without a password "
            f"({type(error).__name__}); cairn keygen writes one"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise StoreRefused(f"CAIRN_SIGNING_KEY names {file}, which is not an Ed25519 key; cairn keygen writes one")
    return key


def signing(store: Store, key: Ed25519PrivateKey, opener: Callable[[str], Store]) -> Store:
    """Change a store so that it signs the ledger files that it creates. Return the same store.

    Args:
        store: the store.
        key: the signing key.
        opener: opens the store at a URL in another process, with that process's own key.
    """
    kind = type(store)
    signs = type(f"Signing{kind.__name__}", (_SigningMixin, kind), {"key": key, "opener": staticmethod(opener)})
    store.__class__ = signs
    return store


class _SigningMixin(_AnyStore):
    """Mixin that signs. It precedes the store class among the bases."""

    key: Ed25519PrivateKey
    opener: Callable[[str], Store]

    def __reduce__(self) -> tuple[Callable[[str], Store], tuple[str]]:  # type: ignore[override] # opened anew
        return self.opener, (self.url,)

    def write(self, path: str, data: bytes) -> None:
        if (signature := part_signature(path)) is not None and signature == signature_path(path, data):
            self._sign(path, data)
        super().write(path, data)

    def delete(self, path: str) -> None:
        super().delete(path)
        if (signature := part_signature(path)) is not None:
            super().delete(signature)

    def delete_many(self, paths: Sequence[str]) -> None:
        super().delete_many([*paths, *(signature for path in paths if (signature := part_signature(path)) is not None)])

    def create(self, path: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
        if not path.startswith(_SIGNED):
            return super().create(path, data, guard)
        signature = self._sign(path, data)
        created = super().create(path, data, guard)  # after an error it may have been created all the same
        if not created:
            self.delete(signature)
        return created

    def _sign(self, path: str, data: bytes) -> str:
        """Write the signature of a file. Return the signature's path."""
        signed = signature_path(path, data)
        signature = {"key": public_key(self.key), "signature": self.key.sign(message(path, data)).hex()}
        super().write(signed, canonical.to_bytes(signature))
        return signed


def part_signature(path: str) -> str | None:
    """Return the path of the signature of a write-ahead part or a file of answers; None for any other file."""
    match = _PART.search(path)
    return None if match is None else f"{path}.{match[1][:_DIGITS]}.sig"


def signature_path(path: str, data: bytes) -> str:
    """Return the path of the signature of these bytes at a path."""
    return f"{path}.{hashlib.sha256(data).hexdigest()[:_DIGITS]}.sig"


def message(path: str, data: bytes) -> bytes:
    """Return the bytes that the signature of a file covers."""
    return f"{_CONTEXT}\n{path}\n{hashlib.sha256(data).hexdigest()}".encode()
