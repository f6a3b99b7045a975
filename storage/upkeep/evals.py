"""Maintenance of evaluations: verification of results, and removal of what interrupted evaluations left.

| file in a result's folder | garbage |
|---|---|
| a file that the result names, the result, its claims | no |
| any other file, if there is a result | yes |
| a write-ahead part of finished samples, without a result | no: the next evaluation recovers it |
| another file of an attempt without a result | yes, unless its claimant is alive |
| an unfinished write | yes, but while a claimant is alive only after a day |
"""

import time
from collections.abc import Iterable, Iterator

from cairn.storage import evals
from cairn.storage.evals import Evaluation
from cairn.storage.ledger import layout
from cairn.storage.ledger.redacted import Fault, Finding
from cairn.storage.ledger.snapshots import PARTS
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store
from cairn.storage.upkeep.collector import Garbage, Reason, discard_unfinished, unfinished
from cairn.storage.upkeep.retention import delete_all
from cairn.storage.upkeep.verification import Verified, verify_file


def verify(store: Store) -> Iterator[Verified]:
    """Read every result of a store with its files and compare them with their digests.

    Yields each result as it is checked. Changes nothing.
    """
    for folder in evals.folders(store):
        path = layout.evaluation_result(folder)
        try:
            data = store.read(path)
        except FileNotFoundError:
            continue  # no process has finished it
        name = folder.removeprefix(f"{layout.EVALS}/")
        try:
            result = Evaluation.from_bytes(data, path)
        except Damaged as error:
            finding = Finding(fault=Fault.UNREADABLE, path=path, message=str(error))
            yield Verified(name=name, files=1, bytes=len(data), findings=(finding,))
            continue
        checks = [verify_file(store, f"{folder}/{output.path}", output) for output in result.outputs]
        findings = [check for check in checks if isinstance(check, Finding)]
        size = len(data) + sum(output.bytes for output in result.outputs)
        yield Verified(name=name, files=1 + len(result.outputs), bytes=size, findings=tuple(findings))


def garbage(store: Store) -> Iterator[Garbage]:
    """Yield all garbage of the evaluations of a store. Changes nothing."""
    for folder in evals.folders(store):
        files = store.find(folder)
        try:
            result = evals.read(store, folder)
        except Damaged:
            continue  # the files that it names are unknown
        named = {f"{folder}/{output.path}" for output in (result.outputs if result is not None else ())}
        lease = evals.claimant(store, folder)
        alive = lease is not None and not lease.is_over()
        for file, size in files.items():
            if file in named or _attempt(folder, file) is None:
                continue
            if result is not None:
                lost = _attempt(folder, file) != result.attempt
                yield Garbage(path=file, bytes=size, reason=Reason.LOST if lost else Reason.SUPERSEDED)
            elif not alive and f"/{PARTS}/" not in file:
                yield Garbage(path=file, bytes=size, reason=Reason.ABANDONED)
        yield from unfinished(store, folder, time.time(), alive)


def collect(store: Store, items: Iterable[Garbage]) -> None:
    """Delete garbage as far as it still exists."""
    items = list(items)
    files = [item.path for item in items if item.reason is not Reason.UNFINISHED]
    delete_all(store, files)
    for folder in sorted({file.rpartition("/")[0] for file in files}, reverse=True):
        store.remove_empty_folders(folder)
        store.remove_empty_folders(folder.removesuffix(f"/{PARTS}"))
    discard_unfinished(store, layout.EVALS, items)


def _attempt(folder: str, file: str) -> str | None:
    """Return the attempt that a file in a result's folder belongs to, or None."""
    name, slash, _ = file.removeprefix(f"{folder}/").partition("/")
    return layout.parse_attempt(f"{name}{slash}")
