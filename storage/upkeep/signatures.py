"""Signatures: proof of the author of ledger files, for writers with keys.

```
runs/<run>/iterations/000042/train.json                           a commit
runs/<run>/iterations/000042/train.json.<16 hex digits>.sig       next to it: a signature of its path and its bytes
```
If `CAIRN_SIGNING_KEY` is the path of an Ed25519 private key (PEM), a process signs everything that it creates
exclusively below `runs/` and `evals/`: manifests, leases, commits, upgrades, decisions, retirement markers, results. It
also signs what it writes ahead of a commit (parts of samples and of calls) and graders' answers (`answers/`). The names
of these files hold the SHA-256 of their bytes, and their signatures are deleted with them. Signed files do not change.
So their digests equal those of an unsigned ledger, and a reader without a key reads the ledger as before.

| order | a crash right after it leaves |
|---|---|
| the signature is written, under a name that holds the digest of the bytes | an unused signature |
| the file is created | both |

So a file of a signer is never without its signature. If an attacker alters a file and recomputes its digests, and those
of everything made from it, the signature for the new content is still missing.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from cairn.storage import evals
from cairn.storage.ledger import layout
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.records import Record
from cairn.storage.store.canonical import from_json
from cairn.storage.store.signed import message, part_signature, signature_path
from cairn.storage.store.store import Store


class Signed(Record):
    """Author of one file of a ledger."""

    path: str
    """Path in the store."""
    signer: str | None
    """Name in the list of signers; None if none of them has a valid signature."""
    problem: str | None = None
    """Sentence about what is wrong, if there is no signer."""


def read_signers(file: Path) -> dict[str, str]:
    """Return the names in a file of signers, by public key.

    Each line has a name and the key in hex; `#` starts a comment. Raises ValueError, saying what is wrong.
    """
    names: dict[str, str] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            name, key = words
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        except ValueError:
            raise ValueError(f"{file}, line {number} is not of the form NAME KEY: a name and 64 hex digits") from None
        names[key.lower()] = name
    if not names:
        raise ValueError(f"{file} names no signer: add a line NAME KEY for each")
    return names


def check_signatures(ledger: Ledger, signers: Mapping[str, str]) -> Iterator[Signed]:
    """Check the signature of every file of a run's ledger, of what it shares, and of its write-ahead parts."""
    for path in _signed_files(ledger):
        yield check_signature(ledger.store, path, signers)


def check_result_signatures(store: Store, signers: Mapping[str, str]) -> Iterator[Signed]:
    """Check the signatures of all results of evaluations, claims, write-ahead parts, and files of graders' answers."""
    for folder in evals.folders(store):
        claims, result = layout.evaluation_claims(folder), layout.evaluation_result(folder)
        paths = [f"{claims}/{name}" for name in store.list(claims) if layout.parse_number(name) is not None]
        for path in [*paths, *([result] if store.exists(result) else []), *_parts(store, folder)]:
            yield check_signature(store, path, signers)
    for path in _parts(store, layout.ANSWERS):
        yield check_signature(store, path, signers)


def check_signature(store: Store, path: str, signers: Mapping[str, str]) -> Signed:
    """Return the author of a file, according to the signature next to it."""
    try:
        data = store.read(path)
    except FileNotFoundError:
        return Signed(path=path, signer=None, problem=f"{path} is missing")
    try:
        fields = from_json(store.read(signature_path(path, data)))
        key, signature = str(fields["key"]), bytes.fromhex(fields["signature"])
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, message(path, data))
    except FileNotFoundError:
        return Signed(path=path, signer=None, problem=f"{path} has no signature of its present content")
    except (ValueError, TypeError, KeyError, InvalidSignature):
        return Signed(
            path=path, signer=None, problem=f"{path} is wrongly signed: its signature belongs to other content"
        )
    if key not in signers:
        return Signed(path=path, signer=None, problem=f"{path} is signed by {key}, which is not one of the signers")
    return Signed(path=path, signer=signers[key])


def _signed_files(ledger: Ledger) -> Iterator[str]:
    owner: Ledger | None = ledger
    while owner is not None:
        store, run = ledger.store, owner.run
        yield layout.run_manifest(run)
        for folder, parse in (
            (layout.upgrades(run), layout.parse_number),
            (layout.decisions(run), layout.parse_number),
            (layout.leases(run), layout.parse_number),
            (layout.retirements(run), layout.parse_retired),
        ):
            yield from (f"{folder}/{name}" for name in store.list(folder) if parse(name) is not None)
        owner = owner.parent
    for iteration in ledger.iterations():
        yield from ledger.markers(iteration)
    yield from _parts(ledger.store, layout.run(ledger.run))


def _parts(store: Store, folder: str) -> list[str]:
    return [path for path in store.find(folder) if part_signature(path) is not None]
