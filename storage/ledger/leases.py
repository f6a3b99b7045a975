"""Leases: only one driver at a time may commit to a run, the one with the newest epoch.

```
runs/<run>/leases/000003.json           created exclusively by the driver that owns the run from then on
runs/<run>/leases/000003.renewed.json   rewritten every few seconds while that driver is alive
runs/<run>/leases/000003.end.json       its outcome, when it releases the run
```

| newest lease | a driver that wants the run |
|---|---|
| none | creates epoch 1 |
| ended | creates the next epoch |
| its process ran on this machine and is gone | creates the next epoch |
| its process runs on this machine | is refused (LeaseHeld) |
| elsewhere, and one of its files changes while the driver watches | is refused |
| elsewhere, and none of its files changes for its time to live | creates the next epoch |
| any, with takeover | creates the next epoch |

If several drivers create one epoch, exactly one wins. Right before each try at a file of commits a driver checks that
its own epoch still exists and that there is no newer one; otherwise it stops. So a driver that was suspended and taken
over commits nothing when it resumes, except through a request that was already sent. Such a request is harmless: the
file is created exclusively, so it is either a valid commit that the new driver finds, or it loses.

A check holds for one try and not for a time. For a time it would need a clock that runs while the process does not. The
monotonic clock stands still while the machine sleeps, and all clocks of a virtual machine do while that is paused: it
would resume with an old check that looks fresh. After a takeover that would be harmless, by the paragraph above. After
a deletion it would not: its commit could be the first in a new run of that name. Checks are few all the same, because
shards share files of commits (`cairn.storage.ledger.shards`).

Renewals also record an iteration that has files, so that the next holder finds the newest one without a search.

No decision depends on the wall clock. A local process is identified by the kernel tick, counted since the boot, at
which it started. A watcher times the changes of a remote holder by its own monotonic clock. The times in a lease are
for people to read.
"""

import itertools
import os
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from pydantic import Field, ValidationError

from cairn.storage.ledger import layout
from cairn.storage.records import Record
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged, LeaseHeld, LeaseLost, StoreError, naming_damaged
from cairn.storage.store.store import Store

# Identity of the process that holds a lease, and whether it is still alive.


_SAME_START = 2.0
"""Greatest difference in seconds between two readings of one process's start time. The start time is derived from a
clock that can be adjusted."""
_PROGRAM = "cairn"
VARIABLES = ("PYTHONPATH", "CAIRN_SERVICES")
"""Environment variables on which the right of a process to run the code of a ledger depends."""
_START_FIELD = 22
"""Number of the field of /proc/<pid>/stat with the clock ticks between the boot and the start of the process."""


class Holder(Record):
    """A driver's process."""

    id: str
    """Random id; no two holders are equal."""
    host: str
    machine: str
    """Kernel boot, process namespace and time namespace. If equal, `pid` and `start_ticks` can be looked up locally."""
    pid: int
    process_started_at: float
    """Start time in Unix seconds, by a clock that may be adjusted later."""
    start_ticks: int | None = None
    """Kernel clock ticks between the boot and the start of the process. Together with boot, namespaces and `pid` they
    identify one process. None in a lease that an earlier version wrote."""
    folder: str | None = None
    """Its working folder."""
    command: tuple[str, ...] = ()
    """Its command line, such as `cairn train my.yaml`; empty for a process that another program started."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Values of `VARIABLES`, where they are set."""

    @classmethod
    def this_process(cls) -> "Holder":
        """Return a holder for the calling process, with a new id."""
        return cls(
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            process_started_at=psutil.Process().create_time(),
            start_ticks=_start_ticks(os.getpid()),
            folder=os.getcwd(),
            command=(_PROGRAM, *sys.argv[1:]) if Path(sys.argv[0]).name == _PROGRAM else (),
            variables={name: value for name in VARIABLES if (value := os.environ.get(name))},
        )

    def is_gone(self) -> bool | None:
        """Return whether the process has ended; None if this machine cannot tell."""
        if not self.machine or self.machine != _machine():
            return None
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            if self.start_ticks is not None:
                return _start_ticks(self.pid) != self.start_ticks
            # Another process may have the pid now, or the clock was adjusted.
            same = abs(process.create_time() - self.process_started_at) < _SAME_START
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            return True
        return False if same else None


def _machine() -> str:
    """Return the identity of this machine's boot and namespaces.

    Returns an empty string if the kernel does not report it; then no process counts as local.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return ""
    # In another time namespace ticks since the boot have another origin. Older kernels have no time namespaces.
    namespaces = [file.stat().st_ino for name in ("pid", "time") if (file := Path("/proc/self/ns", name)).exists()]
    return " ".join([boot.read_text().strip(), *map(str, namespaces)])


def _start_ticks(pid: int) -> int | None:
    """Return the start tick of a process; None if there is no /proc.

    Raises FileNotFoundError or ProcessLookupError if there is no such process.
    """
    if not Path("/proc/self/stat").exists():
        return None
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may hold anything
    return int(after_name[_START_FIELD - 3])


TIME_TO_LIVE = 30.0
"""Seconds without a renewal after which a holder on another machine counts as dead."""
RENEWAL_INTERVAL = 5.0
"""Seconds between renewals."""
WATCH_INTERVAL = 0.5
"""Seconds between two checks of the lease of a holder on another machine."""
_MARKER = {"run", "epoch", "holder", "acquired_at", "time_to_live"}


class Outcome(StrEnum):
    """Reason why a driver ended."""

    COMPLETED = "completed"
    """The run has all its iterations."""
    FAILED = "failed"
    """An error occurred that retries did not resolve."""
    STOPPED = "stopped"
    """A person or program stopped the driver."""
    PREEMPTED = "preempted"
    """The machine was reclaimed: the driver was ordered to end, and shut down cleanly."""


class DriverFailure(Record):
    """Error that ended a driver."""

    kind: str
    """Its class."""
    error: str
    """Its message."""
    advice: str | None = None
    """What to do about it, where it says that apart from the message."""
    iteration: int | None = None
    step: str | None = None
    """Step that failed; None where the error belongs to none."""
    shards: int = 0
    """How many shards of the step failed with an error of this class."""
    tries: int = 1
    """How often the step was tried."""
    resumable: bool = True
    """Whether the ledger alone is enough to go on in the driver's folder: a store may not name everything that a
    recipe may."""


class LeaseSubject(NamedTuple):
    """Subject of a lease, by default a run."""

    folder: str
    """Store path of the folder of its leases."""
    name: str
    """Name in leases and messages."""
    kind: str = "run"
    """Type of the subject, for messages."""

    def path(self, epoch: int, sign: str = "") -> str:
        """Return the path of a lease, or of a sign of its owner: `.renewed` or `.end`."""
        return layout.lease_file(self.folder, epoch, sign)

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


class LeaseState(Record):
    """State of a lease on a run or another subject, as the store has it. Times are Unix seconds by the holder's
    clock."""

    run: str
    """Name of the subject."""
    epoch: int
    holder: Holder
    acquired_at: float
    time_to_live: float
    renewals: int = 0
    renewed_at: float
    outcome: Outcome | None = None
    """Outcome; None until the holder has recorded it."""
    failure: DriverFailure | None = None
    """Error that ended the holder, where one did."""
    iteration: int | None = None
    """An iteration that has files. The newest one is not before it."""

    def is_over(self) -> bool | None:
        """Return whether the run has no owner any more.

        Returns None if one check cannot tell because the holder is on another machine.
        """
        return True if self.outcome is not None else self.holder.is_gone()

    def looks_over(self) -> bool:
        """Return whether the run looks unowned, for display only.

        For a holder on another machine the result trusts the clocks, so no decision may depend on it.
        """
        over = self.is_over()
        return time.time() - self.renewed_at > self.time_to_live if over is None else over

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.acquired_at))
        return f"pid {self.holder.pid} on {self.holder.host} since {since}"


def run_subject(run: str) -> LeaseSubject:
    """Return a run as the subject of a lease."""
    return LeaseSubject(layout.leases(run), run)


def newest_lease(store: Store, run: str | LeaseSubject) -> LeaseState | None:
    """Return the lease with the newest epoch, or None if the subject never had an owner. Raises Damaged."""
    owned = run_subject(run) if isinstance(run, str) else run
    epoch = max(_epochs(store, owned), default=0)
    while store.exists(owned.path(epoch + 1)):  # a listing may lag behind
        epoch += 1
    return _state(store, owned, epoch) if epoch else None


def all_leases(store: Store, run: str) -> list[LeaseState]:
    """Return every lease of a run, the oldest first. Makes three requests for each. Raises Damaged."""
    owned = run_subject(run)
    return [_state(store, owned, epoch) for epoch in sorted(_epochs(store, owned))]


def _epochs(store: Store, owned: LeaseSubject) -> list[int]:
    return layout.numbers(store.list(owned.folder))


def _state(store: Store, owned: LeaseSubject, epoch: int) -> LeaseState:
    fields = _read(store, owned.path(epoch))
    fields["renewed_at"] = fields["acquired_at"]
    for path in (owned.path(epoch, ".renewed"), owned.path(epoch, ".end")):
        with suppress(FileNotFoundError):
            sign = _read(store, path)
            # A driver of a deleted run may have written this file next to the lease of a new run with the same name.
            if sign.pop("holder_id", None) in (None, fields["holder"]["id"]):
                fields |= sign
    try:
        return LeaseState.model_validate(fields)
    except ValidationError as error:
        raise Damaged(f"lease {owned.path(epoch)} cannot be read: {error}") from None


def _read(store: Store, path: str) -> dict[str, Any]:
    with naming_damaged(path):
        return canonical.unseal(store.read(path))


class Lease:
    """The right to commit to a run. This process holds it until `release` or until a newer epoch takes it.

    A lease can also cover another subject that only one process at a time may write, such as the result of an
    evaluation.
    """

    def __init__(self, store: Store, owned: LeaseSubject, state: LeaseState, renewal_interval: float):
        """Do not call this directly; use `Lease.acquire`."""
        self.run = state.run
        self.epoch = state.epoch
        self.holder = state.holder
        self._store = store
        self._owned = owned
        self._time_to_live = state.time_to_live
        self._interval = renewal_interval
        self.iteration = state.iteration
        """An iteration that has files, from which on to look for the newest one. The next holder gets it."""
        self._renewed = time.monotonic()
        self._failure: Exception | None = None
        self._ended = threading.Event()
        # A daemon, so that it does not keep a process alive whose driver has ended.
        self._renewer = threading.Thread(target=self._renew, name="lease-renewal", daemon=True)
        self._renewer.start()

    @classmethod
    def acquire(
        cls,
        store: Store,
        run: str | LeaseSubject,
        takeover: bool = False,
        *,
        time_to_live: float = TIME_TO_LIVE,
        renewal_interval: float = RENEWAL_INTERVAL,
    ) -> "Lease":
        """Own the run from now on.

        Raises LeaseHeld if a live driver owns the run, unless `takeover`, or if another driver was faster. Waits for
        the holder's time to live if the holder ran on another machine and has not recorded its end.
        """
        owned = run_subject(run) if isinstance(run, str) else run
        newest = newest_lease(store, owned)
        if newest is not None and not takeover:
            newest = _require_over(store, owned, newest)
        now = time.time()
        state = LeaseState(
            run=owned.name,
            epoch=newest.epoch + 1 if newest else 1,
            holder=Holder.this_process(),
            acquired_at=now,
            time_to_live=time_to_live,
            renewed_at=now,
            iteration=newest.iteration if newest else None,
        )
        included = _MARKER if state.iteration is None else {*_MARKER, "iteration"}
        marker = canonical.seal(state.model_dump(mode="json", include=included))
        if not store.create(owned.path(state.epoch), marker):
            winner = newest_lease(store, owned)
            assert winner is not None
            raise _refusal(owned, winner)
        return cls(store, owned, state, renewal_interval)

    def check(self) -> None:
        """Check that this driver still owns the run. Makes two requests.

        Raises LeaseLost if it does not, and StoreError if no renewal has reached the store for longer than the time to
        live.
        """
        if self._ended.is_set():
            raise LeaseLost(f"this driver has released {self._owned}")
        if self._store.exists(self._owned.path(self.epoch + 1)):
            newest = newest_lease(self._store, self._owned)
            raise LeaseLost(f"{self._owned} was taken over by {newest}; this driver stops, nothing committed is lost")
        silent = time.monotonic() - self._renewed
        if silent > self._time_to_live and self._failure is not None:
            raise StoreError(
                f"the lease on {self._owned} could not be renewed for {silent:.0f} s: {self._failure}"
            ) from self._failure
        if not self._is_owner():
            self._ended.set()  # no sign of life of this driver belongs to that epoch
            raise LeaseLost(f"{self._owned} was deleted while this driver owned it; this driver stops")

    def release(self, outcome: Outcome, failure: DriverFailure | None = None) -> None:
        """Release the run and record the outcome. A second call does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._renewer.join(self._interval)
        why = {} if failure is None else {"failure": failure.model_dump(mode="json")}
        end = canonical.seal({"outcome": outcome, **self._sign(), **why})
        if self._is_owner():
            self._store.create(self._owned.path(self.epoch, ".end"), end)

    def _is_owner(self) -> bool:
        """Return whether the epoch still belongs to this driver.

        Deleting a run deletes its epochs, and the next run of that name starts again with epoch 1.
        """
        try:
            holder: str = _read(self._store, self._owned.path(self.epoch))["holder"]["id"]
        except FileNotFoundError:
            return False
        return holder == self.holder.id

    def _sign(self) -> dict[str, Any]:
        reached = {} if self.iteration is None else {"iteration": self.iteration}
        return {"renewed_at": time.time(), "holder_id": self.holder.id, **reached}

    def _renew(self) -> None:
        for renewals in itertools.count(1):
            if self._ended.wait(self._interval):
                return
            sign = canonical.seal({"renewals": renewals, **self._sign()})
            try:
                if not self._is_owner():
                    return  # the epoch belongs to another run; `check` reports it
                self._store.write(self._owned.path(self.epoch, ".renewed"), sign)
                self._renewed, self._failure = time.monotonic(), None
            except Exception as error:  # `check` raises it when it lasts; until then the next renewal may succeed
                self._failure = error


def _require_over(store: Store, owned: LeaseSubject, newest: LeaseState) -> LeaseState | None:
    """Return the newest lease once its holder no longer owns the run. Raises LeaseHeld if the holder is alive."""
    over = newest.is_over()
    watched = over is None
    if watched:
        over = _is_silent(store, owned, newest)
    if not over:
        raise _refusal(owned, newest)
    if not watched:
        return newest
    later = newest_lease(store, owned)
    if later is not None and later.outcome is None and later.holder.id != newest.holder.id:
        raise _refusal(owned, later)
    return later


def _is_silent(store: Store, owned: LeaseSubject, seen: LeaseState) -> bool:
    """Return whether a holder on another machine leaves its lease unchanged for its whole time to live.

    Returns True at once if the holder ends meanwhile. Raises LeaseHeld if another driver takes the run.
    """
    end = time.monotonic() + seen.time_to_live
    began = 0.0
    while began < end:  # a look that takes long tells what was at its beginning
        time.sleep(min(WATCH_INTERVAL, seen.time_to_live))
        began = time.monotonic()
        now = newest_lease(store, owned)
        if now is not None and now.outcome is None and now.holder.id != seen.holder.id:
            raise _refusal(owned, now)
        if now != seen:
            return now is None or now.outcome is not None
    return True


def _refusal(owned: LeaseSubject, state: LeaseState) -> LeaseHeld:
    return LeaseHeld(
        f"{owned} is driven by {state}; wait until it ends, stop it, or take the run over with --takeover",
        state.holder,
    )
