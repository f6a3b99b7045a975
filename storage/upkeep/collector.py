"""Files that no commit names: what interrupted and beaten attempts left behind.

| found | garbage |
|---|---|
| a file of an attempt at a step that another attempt was committed for | yes |
| a file that its own attempt's commit does not name, such as a write-ahead part | yes |
| a file that retention removes (`cairn.storage.upkeep.retention`), between its marker and its removal | yes |
| an attempt at a step without a commit, in an iteration that is open | no: a driver writes it or takes it over |
| the same in an earlier iteration | yes, unless it is the live driver's |
| a part of a stream's logs whose groups commits have (`stream_log`) | yes, unless it is the live driver's |
| a claim of an admission (`admissions`), whether that is committed or not | no: it stays, as commits do |
| a write that did not end: a hidden temporary file, an upload in parts | yes, but a live driver's after a day only |

A step's commit is final: the first three are garbage whoever drives the run, so removing them needs no lease. Nothing
reads garbage, so it goes in any order, and what a crash leaves is garbage as before.
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
from cairn.storage.logs.stream_log import groups_of_part, stream_parts
from cairn.storage.records import Record
from cairn.storage.store import canonical
from cairn.storage.store.errors import LeaseLost, SharedWithForks
from cairn.storage.store.store import Store
from cairn.storage.upkeep.retention import delete_all, forks, remove, retired, shared_with_forks

_DAY = 24 * 3600.0


class Reason(StrEnum):
    """Why a file is garbage."""

    LOST = "lost"
    """Another attempt was committed."""
    SUPERSEDED = "superseded"
    """It is not among the files that its attempt committed."""
    RETIRED = "retired"
    """Its snapshot or checkpoint is retired."""
    ABANDONED = "abandoned"
    """The run has gone on without the step."""
    TAKEN = "taken"
    """A stream's, of groups that commits have."""
    UNFINISHED = "unfinished"
    """A write that did not end."""


class Garbage(Record):
    """A file that nobody needs."""

    path: str
    """In the store."""
    bytes: int | None
    """None where the store does not say."""
    reason: Reason


def garbage(ledger: Ledger) -> Iterator[Garbage]:
    """All garbage of a run, by iteration; a fork's own, not that of its parents. Costs one listing an iteration, and
    the commits of those that have files. Changes nothing."""
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
    # A driver may have begun since; one that begins after this look touches its files after it.
    looked_at = time.time()
    oldest = looked_at if _live_epoch(ledger) is None else looked_at - _DAY
    for write in ledger.store.unfinished(layout.run(ledger.run)):
        if write.touched_at < oldest:
            yield Garbage(path=write.path, bytes=write.bytes, reason=Reason.UNFINISHED)


def collect(ledger: Ledger, found: Iterable[Garbage]) -> None:
    """Remove what `garbage` found, as far as it is still there."""
    found = list(found)
    remove(ledger.store, [one.path for one in found if one.reason is not Reason.UNFINISHED])
    unfinished = {one.path for one in found if one.reason is Reason.UNFINISHED}
    for write in ledger.store.unfinished(layout.run(ledger.run)) if unfinished else ():
        if write.path in unfinished:
            ledger.store.discard(write)


def _of_stream(ledger: Ledger, live_epoch: int | None) -> Iterator[Garbage]:
    # Listed before the commits are read: of what a driver has written until then, all admissions are found.
    parts = stream_parts(ledger.store, ledger.run)
    open_ids = open_groups(ledger) if parts else set()
    for path, size in parts.items():
        attempt = layout.stream_attempt(ledger.run, path)
        if attempt is not None and layout.attempt_epoch(attempt) != live_epoch:
            groups = groups_of_part(ledger.store, path)
            if groups and groups.isdisjoint(open_ids):
                yield Garbage(path=path, bytes=size, reason=Reason.TAKEN)


def _live_epoch(ledger: Ledger) -> int | None:
    """That of the run's driver, None without one."""
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
        # A listing may lag behind: only a look at the very path says that there is none.
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


# Deleting a whole run.
#
# | order | what a crash right after it leaves |
# |---|---|
# | the lease is taken: refused while a driver lives | the run, whole |
# | `run.json` is replaced by a note that the run is being deleted | a run that nothing opens; `delete` finishes |
# | everything but `run.json` and the leases is removed | the same, with fewer files |
# | the leases, then `run.json` | the same, and then nothing |
#
# `run.json` goes last because a run is where it is: were it gone first, files without a name would lie there, and a new
# run of that name would take them for its own.
#
# A deletion that was suspended may wake when another one has finished, and there is a new run of that name. So it looks
# whether the note is its own before each few files.


def delete_run(store: Store, run: str) -> None:
    """Delete a run and everything of it, or finish a deletion that was interrupted.

    Raises FileNotFoundError if there is no such run, LeaseHeld while a driver lives and SharedWithForks, naming them,
    while other runs read what they share with it; nothing is changed then. Raises LeaseLost if someone else deletes it
    meanwhile.
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
        raise LeaseLost(f"run {run!r} is deleted by someone else by now, or was; this deletion stops")

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
        delete_all(store, (path for path in store.find(layout.run(run)) if not _is_last(run, path)), require_note)
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


def _is_last(run: str, path: str) -> bool:
    return path == layout.run_manifest(run) or path.startswith(f"{layout.leases(run)}/")


def _require_unshared(store: Store, run: str) -> None:
    found = forks(store, run)
    if found:
        names = ", ".join(f"{name} (up to iteration {iteration})" for name, iteration in sorted(found.items()))
        raise SharedWithForks(f"run {run!r} is read by its forks: {names}; delete these first")
