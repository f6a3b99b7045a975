"""Deleting a whole run.

| order | what a crash right after it leaves |
|---|---|
| the lease is taken: refused while a driver lives | the run, whole |
| `run.json` is replaced by a note that the run is being deleted | a run that nothing opens; `delete` finishes |
| everything but `run.json` and the leases is removed | the same, with fewer files |
| the leases, then `run.json` | the same, and then nothing |

`run.json` goes last because a run is where it is: were it gone first, files without a name would lie there, and a new
run of that name would take them for its own.

A deletion that was suspended may wake when another one has finished, and there is a new run of that name. So it looks
whether the note is its own before each few files.
"""

import time

from cairn.storage import canonical, layout
from cairn.storage.errors import LeaseLost, SharedWithForks
from cairn.storage.leases import Lease, Outcome
from cairn.storage.retention import delete_all, forks
from cairn.storage.store import Store


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
