"""Garbage collection: files that no commit names, left by interrupted and beaten attempts.

| file | garbage |
|---|---|
| a file of an attempt at a step for which another attempt was committed | yes |
| a file that its own attempt's commit does not name, such as a write-ahead part | yes |
| a file that retention removes (`cairn.storage.upkeep.retention`), between its marker and its removal | yes |
| an attempt at a step without a commit, in an open iteration | no: a driver writes it or recovers it |
| the same in an earlier iteration | yes, unless it is the live driver's |
| a part of a stream's logs whose groups are committed (`storage.logs.log`) | yes, unless it is the live driver's |
| a claim of an admission (`admissions`), committed or not | no: it stays, as commits do |
| an unfinished write: a hidden temporary file, an upload in parts | yes, but a live driver's only after a day |

The commit of a step is final. So the first three kinds are garbage even while a driver runs, and removing them needs no
lease. Nothing reads garbage, so the order of removal does not matter, and a crash leaves only garbage.
"""

import time
from collections.abc import Iterable, Iterator
from enum import StrEnum

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.layout import Kind
from cairn.storage.ledger.leases import Lease, Outcome, newest_lease
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.logs.admissions import open_groups
from cairn.storage.logs.sample_log import groups_of_part, stream_parts
from cairn.storage.records import Record
from cairn.storage.store import canonical
from cairn.storage.store.errors import LeaseLost, SharedWithForks
from cairn.storage.store.store import Store
from cairn.storage.upkeep.retention import delete_all, forks, remove, retired, shared_with_forks

_DAY = 24 * 3600.0


class Reason(StrEnum):
    """Reason why a file is garbage."""

    LOST = "lost"
    """Another attempt was committed."""
    SUPERSEDED = "superseded"
    """The attempt's commit does not name the file."""
    RETIRED = "retired"
    """Its snapshot or checkpoint is retired."""
    ABANDONED = "abandoned"
    """The run has continued without the step."""
    TAKEN = "taken"
    """The file is a part of a stream's logs, and commits contain its groups."""
    UNFINISHED = "unfinished"
    """The write did not finish."""


class Garbage(Record):
    """An unneeded file."""

    path: str
    """Path in the store."""
    bytes: int | None
    """Size; None if the store does not report it."""
    reason: Reason


def garbage(ledger: Ledger) -> Iterator[Garbage]:
    """Yield all garbage of a run by iteration, without that of its parents. Changes nothing.

    Makes one listing for each iteration, and reads the commits of iterations with files.
    """
    newest = ledger.last_iteration()
    live_epoch = _live_epoch(ledger)
    gone, shared = retired(ledger), shared_with_forks(ledger)
    for entry in ledger.store.list(layout.iterations(ledger.run)):
        iteration = layout.parse_iteration(entry)
        if iteration is None:
            continue
        in_work = newest is None or iteration >= newest - ledger.lag
        kinds = {kind for kind in Kind if (iteration, kind) in gone and iteration > shared}
        yield from _of_iteration(ledger, iteration, in_work, live_epoch, kinds)
    yield from _of_stream(ledger, live_epoch)
    # A driver may have started since the first check. One that starts after this second check writes its files later.
    checked_at = time.time()
    yield from unfinished(ledger.store, layout.run(ledger.run), checked_at, alive=_live_epoch(ledger) is not None)


def unfinished(store: Store, folder: str, checked_at: float, alive: bool) -> Iterator[Garbage]:
    """Yield the writes below a folder that did not finish by `checked_at`, in Unix seconds.

    `alive`: a process that writes there may be alive; then a write counts only after a day.
    """
    oldest = checked_at - _DAY if alive else checked_at
    for write in store.unfinished(folder):
        if write.touched_at < oldest:
            yield Garbage(path=write.path, bytes=write.bytes, reason=Reason.UNFINISHED)


def collect(ledger: Ledger, items: Iterable[Garbage]) -> None:
    """Delete garbage as far as it still exists."""
    items = list(items)
    remove(ledger.store, [item.path for item in items if item.reason is not Reason.UNFINISHED])
    discard_unfinished(ledger.store, layout.run(ledger.run), items)


def discard_unfinished(store: Store, folder: str, items: Iterable[Garbage]) -> None:
    """Discard the unfinished writes below a folder that are among `items`."""
    paths = {item.path for item in items if item.reason is Reason.UNFINISHED}
    for write in store.unfinished(folder) if paths else ():
        if write.path in paths:
            store.discard(write)


def _of_stream(ledger: Ledger, live_epoch: int | None) -> Iterator[Garbage]:
    # List the parts before reading the commits, so that the admissions of all listed samples are found.
    parts = stream_parts(ledger.store, ledger.run)
    open_ids = open_groups(ledger) if parts else set()
    for path, size in parts.items():
        attempt = layout.stream_attempt(ledger.run, path)
        if attempt is not None and layout.attempt_epoch(attempt) != live_epoch:
            groups = groups_of_part(ledger.store, path)
            if groups and groups.isdisjoint(open_ids):
                yield Garbage(path=path, bytes=size, reason=Reason.TAKEN)


def _live_epoch(ledger: Ledger) -> int | None:
    """Return the epoch of the run's driver, or None if there is none."""
    lease = newest_lease(ledger.store, ledger.run)
    return lease.epoch if lease is not None and not lease.is_over() else None


def _of_iteration(
    ledger: Ledger, iteration: int, in_work: bool, live_epoch: int | None, kinds: set[Kind]
) -> Iterator[Garbage]:
    folder = layout.iteration(ledger.run, iteration)
    files = ledger.store.find(folder)
    places = {path: place for path in files if (place := layout.parse_file(ledger.run, path))}
    if not places:
        return
    commits = {
        (str(commit.step), commit.shard): commit for commit in ledger.commits(iteration) if commit.run == ledger.run
    }
    for step, shard in {(step, layout.attempt_shard(attempt)) for _, step, attempt in places.values()} - commits.keys():
        # A listing may lag behind, so look up the exact path.
        commit = ledger.find(iteration, Step(step), shard) if step in set(Step) else None
        if commit is not None and commit.run == ledger.run:
            commits[step, shard] = commit
    for path, (_, step, attempt) in places.items():
        commit = commits.get((step, layout.attempt_shard(attempt)))
        reason = None
        if commit is None:
            if not in_work and layout.attempt_epoch(attempt) != live_epoch:
                reason = Reason.ABANDONED
        elif commit.attempt != attempt:
            reason = Reason.LOST
        elif path not in {layout.in_run(ledger.run, output.path) for output in commit.outputs}:
            reason = Reason.SUPERSEDED
        elif Kind.of(commit.step) in kinds:
            reason = Reason.RETIRED
        if reason is not None:
            yield Garbage(path=path, bytes=files[path], reason=reason)


# Deletion of a whole run.
#
# | order | a crash right after it leaves |
# |---|---|
# | acquire the lease: refused while a driver is alive | the whole run |
# | replace `run.json` by a note that the run is being deleted | a run that cannot be opened; `delete` finishes |
# | delete everything but `run.json` and the leases | the same, with fewer files |
# | delete the leases, then `run.json` | the same, and then nothing |
#
# `run.json` goes last because a run exists as long as it does. If it went first, files would remain, and a new run of
# the same name would adopt them.
#
# A suspended deletion may resume after another deletion has finished and a new run of that name exists. So it checks
# before each few files that the note is its own.


def delete_run(store: Store, run: str) -> None:
    """Delete a run with all its files, or finish an interrupted deletion.

    Raises FileNotFoundError if there is no such run, LeaseHeld while a driver is alive, and SharedWithForks, naming the
    forks, while other runs read what they share with it; then nothing is changed. Raises LeaseLost if another process
    deletes it meanwhile.
    """
    manifest = layout.run_manifest(run)
    if not store.exists(manifest):
        raise FileNotFoundError(f"there is no run {run!r} in {store.url}; `cairn runs` lists them")
    _require_unshared(store, run)
    lease = Lease.acquire(store, run)
    note = canonical.seal({"run": run, "being_deleted_since": time.time(), "by": lease.holder.id})

    def require_note() -> None:
        try:
            if store.read(manifest) == note:
                return
        except FileNotFoundError:
            pass
        raise LeaseLost(f"run {run!r} is being deleted, or was deleted, by another process; this deletion stops")

    try:
        before = store.read(manifest)
        lease.check()
        store.write(manifest, note)
        try:
            _require_unshared(store, run)  # a fork made in between reads the note, or is seen here
        except Exception:
            require_note()
            store.write(manifest, before)
            raise
        files = store.find(layout.run(run)).keys() - store.find(layout.leases(run)).keys() - {manifest}
        delete_all(store, sorted(files), require_note)
        for write in store.unfinished(layout.run(run)):
            require_note()
            store.discard(write)
    finally:
        lease.release(Outcome.STOPPED)
    leases = store.find(layout.leases(run))
    for ends in (False, True):  # a lease without its end would look as if its holder lived
        delete_all(store, (path for path in leases if (path.rpartition("/")[2].count(".") > 1) == ends), require_note)
    delete_all(store, [manifest], require_note)
    store.remove_empty_folders(layout.run(run))


def _require_unshared(store: Store, run: str) -> None:
    if readers := forks(store, run):
        names = ", ".join(f"{name} (up to iteration {iteration})" for name, iteration in sorted(readers.items()))
        raise SharedWithForks(f"run {run!r} is still read by its forks {names}; delete these first")
