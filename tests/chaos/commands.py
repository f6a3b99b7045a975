"""What people do to a run while its driver works: `cairn gc`, `cairn fork`, `cairn delete`.

gc      removes what is garbage then, and what retention lets go
fork    makes a run of the newest iteration that was trained; it must be readable and restorable to the end
delete  of the run is refused while a driver lives; the oldest fork that `fork` made is deleted
"""

import uuid
from typing import Literal, get_args

from cairn.flows.cli.command import Root
from cairn.flows.cli.housekeeping import gc
from cairn.flows.history.fork import fork
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import list_runs
from cairn.storage.opening import open_store
from cairn.storage.store.errors import LeaseHeld, Retired, SharedWithForks
from cairn.storage.store.store import Store
from cairn.storage.upkeep.collector import delete_run
from cairn.storage.upkeep.retention import require_restorable
from cairn.storage.upkeep.verification import verify

Command = Literal["gc", "fork", "delete"]
COMMANDS: tuple[Command, ...] = get_args(Command)

_FORK = "fork-"


def give(command: Command, store_url: str, run: str) -> str:
    """Run a command now. Return its result in words. Raises the command's error where that is not expected."""
    store = open_store(store_url)
    ledger = Ledger.open(store, run)
    if command == "gc":
        return _collect(store_url, run)
    if command == "fork":
        return _fork(ledger)
    return _delete(store, run)


def _collect(store_url: str, run: str) -> str:
    removed = gc(Root(store_url), run, apply=True).value
    return f"removed {len(removed['garbage'])} files and {len(removed['retention'])} retired snapshots"


def _fork(ledger: Ledger) -> str:
    last = ledger.last_iteration()
    trained = [] if last is None else [i for i in (last, last - 1) if i >= 0 and ledger.find(i, Step.TRAIN)]
    if not trained:
        return "nothing to fork yet"
    name = f"{_FORK}{uuid.uuid4().hex[:8]}"
    try:
        fork(ledger, trained[0], name, [f"rollout.num_rollout={trained[0] + 2}"])
    except Retired as error:
        return f"refused: {error}"
    return f"made {name} of iteration {trained[0]}"


def _delete(store: Store, run: str) -> str:
    try:
        delete_run(store, run)
    except (LeaseHeld, SharedWithForks):
        pass
    else:
        raise AssertionError("a run was deleted although its driver lives")
    made = forks_of(store)
    if not made:
        return "refused, and no fork to delete"
    delete_run(store, made[0])
    return f"refused, and deleted {made[0]}"


def forks_of(store: Store) -> list[str]:
    """Return the runs that `fork` made and that still exist."""
    return [name for name in list_runs(store) if name.startswith(_FORK)]


def unusable_forks(store: Store) -> list[str]:
    """Return the problems of forks that were made while a driver ran."""
    found = []
    for name in forks_of(store):
        ledger = Ledger.open(store, name)
        found += [f"{name}: {finding.message}" for checked in verify(ledger) for finding in checked.findings]
        assert ledger.parent is not None
        try:
            require_restorable(ledger.parent, ledger.first_iteration - 1)
        except Retired as error:
            found.append(f"{name}: {error}")
    return found
