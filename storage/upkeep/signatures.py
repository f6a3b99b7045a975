"""Signatures: who wrote what of a ledger, where its writers have keys.

```
runs/<run>/iterations/000042/train.json                           a commit
runs/<run>/iterations/000042/train.json.<16 hex digits>.sig       beside it: a signature of its path and its bytes
```
A process that finds `CAIRN_SIGNING_KEY`, the path of an Ed25519 private key (PEM), signs whatever it creates
exclusively below `runs/` and `evals/`: manifests, leases, commits, upgrades, decisions, markers of retirement, results.
It signs too what it writes ahead of a commit, parts of samples and of calls, and what graders answered (`answers/`):
files whose names hold the SHA-256 of their bytes, whose signatures go when they do. Nothing that is signed changes for
that, so digests are those of a ledger without signatures, and who has no key reads it as ever.

| order | a crash right after it leaves |
|---|---|
| the signature is written, under a name that holds the digest of the bytes | a signature that nobody looks for |
| the file is created | both |

So what a signer has written is never without its signature. Somebody who alters a file, computes its digests anew, and
those of all that was made from it, still has no signature under what it holds then.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from cairn.storage import evals
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Record
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.store import canonical
from cairn.storage.store.canonical import from_json
from cairn.storage.store.errors import StoreRefused
from cairn.storage.store.store import Store

if TYPE_CHECKING:
    from cairn.storage.store.local import LocalStore as _AnyStore
else:
    _AnyStore = object

_CONTEXT = "cairn ledger 1"
"""Begins what is signed: no signature made for another purpose counts."""
_SIGNED = ("runs/", "evals/")
_PART = re.compile(r"(?:/write_ahead/|^answers/)(?:.*[./])?([0-9a-f]{64})\.arrow$")
_DIGITS = 16
"""Of a digest in the name of a signature."""


def new_key(file: Path) -> str:
    """Write a new private key, readable by its owner alone; returns its public key in hex. Raises FileExistsError."""
    key = Ed25519PrivateKey.generate()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return public_key(key)


def public_key(key: Ed25519PrivateKey) -> str:
    """In hex."""
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def read_key(file: str) -> Ed25519PrivateKey:
    """Raises StoreRefused, naming the file and nothing of what it holds."""
    try:
        key = load_pem_private_key(Path(file).expanduser().read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise StoreRefused(
            f"CAIRN_SIGNING_KEY names {file}, which is no readable private key without a password "
            f"({type(error).__name__}); cairn keygen writes one"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise StoreRefused(f"CAIRN_SIGNING_KEY names {file}, which is no Ed25519 key; cairn keygen writes one")
    return key


def signing(store: Store, key: Ed25519PrivateKey) -> Store:
    """The same store, of the same kind, which signs what it creates of a ledger."""
    kind = type(store)
    signs = type(f"Signing{kind.__name__}", (_Signs, kind), {"key": key})
    store.__class__ = signs
    return store


class _Signs(_AnyStore):
    """Before a kind of store among the bases of a class."""

    key: Ed25519PrivateKey

    def __reduce__(self) -> tuple[Callable[[str], Store], tuple[str]]:  # type: ignore[override] # opened anew
        from cairn.storage.store.store import open_store

        return open_store, (self.url,)

    def write(self, path: str, data: bytes) -> None:
        if (beside := part_signature(path)) is not None and beside == signature_path(path, data):
            self._sign(path, data)
        super().write(path, data)

    def delete(self, path: str) -> None:
        super().delete(path)
        if (beside := part_signature(path)) is not None:
            super().delete(beside)

    def create(self, path: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
        if not path.startswith(_SIGNED):
            return super().create(path, data, guard)
        beside = self._sign(path, data)
        created = super().create(path, data, guard)  # after an error it may have been created all the same
        if not created:
            self.delete(beside)
        return created

    def _sign(self, path: str, data: bytes) -> str:
        beside = signature_path(path, data)
        signature = {"key": public_key(self.key), "signature": self.key.sign(_message(path, data)).hex()}
        super().write(beside, canonical.to_bytes(signature))
        return beside


class Signed(Record):
    """Who wrote one file of a ledger."""

    path: str
    """In the store."""
    signer: str | None
    """The name that the list of signers gives; None where no signature of one of them is right."""
    problem: str | None = None
    """One sentence, where there is none."""


def read_signers(file: Path) -> dict[str, str]:
    """Names by public key, of a file with a line for each: a name, and the key in hex. `#` begins a comment. Raises
    ValueError with a sentence."""
    found: dict[str, str] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            name, key = words
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        except ValueError:
            raise ValueError(f"{file}, line {number} is not NAME KEY, a name and 64 hex digits") from None
        found[key.lower()] = name
    if not found:
        raise ValueError(f"{file} names no signer: give each a line, NAME KEY")
    return found


def check_signatures(ledger: Ledger, signers: Mapping[str, str]) -> Iterator[Signed]:
    """Hold every file of a run's ledger, of what it shares with its parents, and of what is written ahead of its
    commits, against its signature."""
    for path in _signed_files(ledger):
        yield check_signature(ledger.store, path, signers)


def check_result_signatures(store: Store, signers: Mapping[str, str]) -> Iterator[Signed]:
    """Hold every result of an evaluation, every claim to make one, what is written ahead of results, and every file of
    what graders answered, against its signature."""
    for folder in evals.folders(store):
        claims, result = layout.evaluation_claims(folder), layout.evaluation_result(folder)
        paths = [f"{claims}/{name}" for name in store.list(claims) if layout.parse_lease(name) is not None]
        for path in [*paths, *([result] if store.exists(result) else []), *_parts(store, folder)]:
            yield check_signature(store, path, signers)
    for path in _parts(store, layout.ANSWERS):
        yield check_signature(store, path, signers)


def check_signature(store: Store, path: str, signers: Mapping[str, str]) -> Signed:
    """Who wrote a file, by the signature beside it."""
    try:
        data = store.read(path)
    except FileNotFoundError:
        return Signed(path=path, signer=None, problem=f"{path} is missing")
    try:
        fields = from_json(store.read(signature_path(path, data)))
        key, signature = str(fields["key"]), bytes.fromhex(fields["signature"])
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, _message(path, data))
    except FileNotFoundError:
        return Signed(path=path, signer=None, problem=f"{path}, as it is, is signed by nobody")
    except (ValueError, TypeError, KeyError, InvalidSignature):
        return Signed(path=path, signer=None, problem=f"{path} is wrongly signed: its signature is of something else")
    if key not in signers:
        return Signed(path=path, signer=None, problem=f"{path} is signed by {key}, which is none of the signers")
    return Signed(path=path, signer=signers[key])


def _signed_files(ledger: Ledger) -> Iterator[str]:
    owner: Ledger | None = ledger
    while owner is not None:
        store, run = ledger.store, owner.run
        yield layout.run_manifest(run)
        for folder, parse in (
            (layout.upgrades(run), layout.parse_decision),
            (layout.decisions(run), layout.parse_decision),
            (layout.leases(run), layout.parse_lease),
            (layout.retirements(run), layout.parse_retired),
        ):
            yield from (f"{folder}/{name}" for name in store.list(folder) if parse(name) is not None)
        owner = owner.parent
    for iteration in ledger.iterations():
        yield from ledger.markers(iteration)
    yield from _parts(ledger.store, layout.run(ledger.run))


def _parts(store: Store, folder: str) -> list[str]:
    return [path for path in store.find(folder) if part_signature(path) is not None]


def part_signature(path: str) -> str | None:
    """Where the signature of a part that is written ahead of a commit, or of answers, is; None of any other file."""
    match = _PART.search(path)
    return None if match is None else f"{path}.{match[1][:_DIGITS]}.sig"


def signature_path(path: str, data: bytes) -> str:
    """Where the signature of these bytes at a path is."""
    return f"{path}.{hashlib.sha256(data).hexdigest()[:_DIGITS]}.sig"


def _message(path: str, data: bytes) -> bytes:
    return f"{_CONTEXT}\n{path}\n{hashlib.sha256(data).hexdigest()}".encode()
