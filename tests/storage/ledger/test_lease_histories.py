"""Leases under any history of drivers: one of them owns the run, and a run that nobody owns can be had at once."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from cairn.storage.ledger import layout
from cairn.storage.ledger.leases import Holder, Lease, Outcome, _start_ticks, newest_lease
from cairn.storage.store.errors import LeaseHeld, LeaseLost
from cairn.storage.store.local import LocalStore

NEVER = 3600.0
"""Seconds between two renewals of a lease that its holder does not renew while the test lasts."""

this_process = Holder.this_process

PATIENCE = 0.01
"""Time to live of a lease that only its renewals keep: seconds."""


@dataclass
class Driver:
    """One that has had the run."""

    lease: Lease
    process: "subprocess.Popen[bytes] | None"
    """Which holds the lease; None for one on another machine that does not renew it."""
    deleted: bool = False
    """Whether the run that it owned is deleted."""
    outcome: Outcome | None = None
    renewals: int = 0
    """As its newest sign of life counts them."""

    @property
    def lives(self) -> bool:
        """As far as others can tell."""
        return self.outcome is None and self.process is not None and self.process.poll() is None

    def owns(self) -> bool:
        """Whether it passes its check."""
        try:
            self.lease.check()
        except LeaseLost:
            return False
        return True


class RacedStore(LocalStore):
    """A store in which others may be faster."""

    before_create: Callable[[], object] | None = None
    before_write: Callable[[], object] | None = None

    def write(self, path: str, data: bytes) -> None:
        faster, self.before_write = self.before_write, None
        if faster is not None:
            faster()
        super().write(path, data)

    def create(self, path: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
        faster, self.before_create = self.before_create, None
        if faster is not None:
            faster()
        return super().create(path, data, guard)


class Leases(RuleBasedStateMachine):
    """Processes of this machine, which others see end, and drivers elsewhere, which fall silent."""

    drivers = Bundle("drivers")

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.store = RacedStore(self.folder)
        self.history: list[Driver] = []
        """Drivers of the run that has the name now, one an epoch."""
        self.forgotten: list[Driver] = []
        """Drivers of deleted runs."""

    def teardown(self) -> None:
        for driver in [*self.history, *self.forgotten]:
            driver.lease._ended.set()
            if driver.process is not None:
                driver.process.kill()
                driver.process.communicate()
        shutil.rmtree(self.folder)

    def acquire(self, takeover: bool, elsewhere: bool) -> Driver:
        process = None if elsewhere else subprocess.Popen("cat", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        holder = this_process()
        if process is None:
            holder = holder.model_copy(update={"host": "elsewhere", "machine": "another boot"})
        else:
            holder = holder.model_copy(update={"pid": process.pid, "start_ticks": _start_ticks(process.pid)})
        try:
            with patch.object(Holder, "this_process", lambda: holder):
                lease = Lease.acquire(
                    self.store, "run-1", takeover, time_to_live=PATIENCE if elsewhere else NEVER, renewal_interval=NEVER
                )
        except LeaseHeld:
            if process is not None:
                process.kill()
                process.communicate()
            raise
        assert lease.epoch == len(self.history) + 1
        self.history.append(driver := Driver(lease, process))
        return driver

    @rule(target=drivers, takeover=st.booleans(), elsewhere=st.booleans())
    def begins(self, takeover: bool, elsewhere: bool) -> Driver:
        if takeover or not self.history or not self.history[-1].lives:
            return self.acquire(takeover, elsewhere)
        with pytest.raises(LeaseHeld) as caught:
            self.acquire(takeover, elsewhere)
        assert caught.value.holder == self.history[-1].lease.holder
        return self.history[-1]

    @rule(target=drivers, takeover=st.booleans(), elsewhere=st.booleans())
    def begins_too_late(self, takeover: bool, elsewhere: bool) -> Driver:
        """Another one takes the run after this one has looked who owns it."""
        self.store.before_create = lambda: self.acquire(True, False)
        before = len(self.history)
        with pytest.raises(LeaseHeld):
            self.acquire(takeover, elsewhere)
        self.store.before_create = None
        assert len(self.history) - before <= 1
        return self.history[-1]

    @rule(driver=drivers)
    def is_killed(self, driver: Driver) -> None:
        if driver.process is not None:
            driver.process.kill()
            driver.process.communicate()

    @rule(driver=drivers, outcome=st.sampled_from(Outcome))
    def ends(self, driver: Driver, outcome: Outcome) -> None:
        driver.lease.release(outcome)
        if not driver.deleted:
            driver.outcome = driver.outcome or outcome

    @rule(driver=drivers)
    def renews(self, driver: Driver) -> None:
        """Once, as its thread does: also a driver that was taken over, or whose run is deleted, wakes and does so."""
        waits = iter([False, True])
        with patch.object(driver.lease._ended, "wait", lambda seconds: next(waits)):
            driver.lease._renew()
        driver.renewals = 1

    @rule(target=drivers, driver=drivers)
    def renews_too_late(self, driver: Driver) -> Driver:
        """The run is deleted after the driver has looked whether it still owns it, and begins anew."""
        self.store.before_write = self.is_deleted
        self.renews(driver)
        self.store.before_write = None
        return self.history[-1] if self.history else self.acquire(False, False)

    @rule()
    def is_deleted(self) -> None:
        """The run, while drivers may believe to own it. The next run of its name begins with the first epoch."""
        for path in self.store.find(layout.leases("run-1")):
            self.store.delete(path)
        for one in self.history:
            one.deleted = True
        self.forgotten += self.history
        self.history = []

    @rule(driver=drivers)
    def checks(self, driver: Driver) -> None:
        """One of a deleted run learns of it when it looks, and may not have looked for long."""
        assert driver.owns() == (driver in self.history[-1:] and driver.outcome is None)

    @invariant()
    def only_the_newest_owns_the_run_until_it_ends(self) -> None:
        for driver in self.history:
            assert driver.owns() == (driver in self.history[-1:] and driver.outcome is None)

    @invariant()
    def the_store_tells_of_the_newest(self) -> None:
        state = newest_lease(self.store, "run-1")
        assert (state is None) == (not self.history)
        if state is not None:
            newest = self.history[-1]
            assert (state.epoch, state.holder) == (len(self.history), newest.lease.holder)
            assert (state.outcome, state.renewals) == (newest.outcome, newest.renewals)
            assert state.acquired_at <= state.renewed_at <= time.time()


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=30, stateful_step_count=15)
