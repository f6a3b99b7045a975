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

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from cairn.storage import evals
from cairn.storage.ledger import layout
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.records import Record
from cairn.storage.store.canonical import from_json
from cairn.storage.store.signed import _message, part_signature, signature_path
from cairn.storage.store.store import Store

if TYPE_CHECKING:
    from cairn.storage.store.local import LocalStore as _AnyStore
else:
    _AnyStore = object


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
