"""One driver owns a run, whatever happens to the others."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage import canonical, layout
from storage.commits import Step
from storage.errors import LeaseHeld, LeaseLost, StoreError
from storage.leases import TIME_TO_LIVE, Holder, Lease, Outcome, newest_lease
from storage.ledger import Ledger
from storage.local import LocalStore
from storage.store import Store
from tests.waiting import wait_for

_DRIVER = """
import sys, time
sys.path.insert(0, {root!r})
from storage.errors import LeaseLost
from storage.commits import Step
from storage.ledger import Ledger
from storage.store import open_store
from tests.storage.builders import commit_step
ledger = Ledger.open(open_store(sys.argv[1]), "run-1")
print(ledger.acquire().epoch, flush=True)
"""
_COMMIT_WHEN_TOLD = """
for iteration in range(1000):
    sys.stdin.readline()
    try:
        print(commit_step(ledger, iteration, Step.SYNC).name, flush=True)
    except LeaseLost as error:
        print("stopped:", error, flush=True)
        break
"""


class Driver:
    """A process that owns run-1 and commits once for each `commit()`."""

    def __init__(self, store: Store, then: str = _COMMIT_WHEN_TOLD):
        code = _DRIVER.format(root=str(Path(__file__).parents[2])) + then
        command = [sys.executable, "-c", code, store.url]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.epoch = int(self.answer())

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def commit(self) -> str:
        self.tell()
        return self.answer()

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def ledger(store: Store) -> Ledger:
    return Ledger.create(store, "run-1", {})


def test_of_racing_drivers_exactly_one_owns_the_run(store: Store) -> None:
    def acquire(_: int) -> Lease | None:
        try:
            return Lease.acquire(store, "run-1")
        except LeaseHeld:
            return None

    with ThreadPoolExecutor(8) as pool:
        leases = [lease for lease in pool.map(acquire, range(8)) if lease is not None]
    assert [lease.epoch for lease in leases] == [1]
    leases[0].check()


def test_a_live_driver_is_named_and_a_killed_one_is_succeeded_at_once(ledger: Ledger) -> None:
    driver = Driver(ledger.store)
    try:
        assert driver.commit() == "000000/sync"
        with pytest.raises(LeaseHeld, match=rf"is driven by pid {driver.process.pid} on .* --takeover") as caught:
            ledger.acquire()
        assert caught.value.holder.pid == driver.process.pid
        driver.process.send_signal(signal.SIGKILL)
        # Not waited for: what is left of the process is a zombie, which owns nothing.
        wait_for(caught.value.holder.is_gone)
        began = time.monotonic()
        assert ledger.acquire().epoch == 2
        assert time.monotonic() - began < TIME_TO_LIVE / 3, "as on another machine"
    finally:
        driver.close()
    assert ledger.find(0, Step.SYNC) is not None


def test_a_driver_suspended_past_a_takeover_commits_nothing_when_it_wakes(ledger: Ledger) -> None:
    driver = Driver(ledger.store)
    try:
        assert driver.commit() == "000000/sync"
        os.kill(driver.process.pid, signal.SIGSTOP)
        with pytest.raises(LeaseHeld):
            ledger.acquire()
        assert ledger.acquire(takeover=True).epoch == 2
        os.kill(driver.process.pid, signal.SIGCONT)
        assert driver.commit().startswith("stopped: run 'run-1' was taken over by pid")
    finally:
        driver.close()
    assert ledger.find(1, Step.SYNC) is None


def test_the_renewal_does_not_keep_a_process_alive(ledger: Ledger) -> None:
    driver = Driver(ledger.store, then="")
    assert driver.process.wait(timeout=120) == 0
    driver.close()
    assert ledger.acquire().epoch == 2


def test_a_released_lease_says_how_it_ended(store: Store) -> None:
    assert newest_lease(store, "run-1") is None
    lease = Lease.acquire(store, "run-1")
    state = newest_lease(store, "run-1")
    assert state is not None
    assert state.outcome is None
    assert not state.is_over()
    lease.release(Outcome.STOPPED)
    lease.release(Outcome.FAILED)
    state = newest_lease(store, "run-1")
    assert state is not None
    assert state.outcome is Outcome.STOPPED
    assert state.is_over()
    with pytest.raises(LeaseLost):
        lease.check()
    assert Lease.acquire(store, "run-1").epoch == 2


def _lease_from_elsewhere(store: Store, renewed_seconds_ago: float, time_to_live: float) -> None:
    holder = Holder.this_process().model_copy(update={"host": "elsewhere", "machine": "another boot"})
    then = time.time() - renewed_seconds_ago
    lease = {
        "run": "run-1",
        "epoch": 1,
        "holder": holder.model_dump(mode="json"),
        "acquired_at": then,
        "time_to_live": time_to_live,
    }
    assert store.create(layout.lease("run-1", 1), canonical.seal(lease))


def test_a_driver_elsewhere_is_alive_as_long_as_it_may_be_silent(store: Store) -> None:
    _lease_from_elsewhere(store, 0.0, time_to_live=300)
    with pytest.raises(LeaseHeld, match="on elsewhere since"):
        Lease.acquire(store, "run-1")


def test_a_driver_elsewhere_that_does_not_renew_any_more_is_dead(store: Store) -> None:
    _lease_from_elsewhere(store, 1000.0, time_to_live=0.3)
    assert Lease.acquire(store, "run-1").epoch == 2


def test_a_driver_elsewhere_whose_clock_is_behind_is_alive_while_it_renews(store: Store) -> None:
    _lease_from_elsewhere(store, 1000.0, time_to_live=9)
    ended = threading.Event()

    def renew() -> None:
        renewals = 0
        while not ended.wait(0.1):
            renewals += 1
            sign = canonical.seal({"renewals": renewals, "renewed_at": time.time() - 1000})
            store.write(layout.lease_renewal("run-1", 1), sign)

    renewer = threading.Thread(target=renew)
    renewer.start()
    try:
        with pytest.raises(LeaseHeld, match="on elsewhere"):
            Lease.acquire(store, "run-1")
    finally:
        ended.set()
        renewer.join()


def test_renewals_reach_the_store(store: Store) -> None:
    lease = Lease.acquire(store, "run-1", renewal_interval=0.05)
    state = wait_for(lambda: (newest := newest_lease(store, "run-1")) and newest.renewals >= 3 and newest)
    assert state.renewed_at > state.acquired_at
    lease.release(Outcome.COMPLETED)


class _FailingStore(LocalStore):
    """Fails to write while it is told to."""

    failing = False

    def write(self, path: str, data: bytes) -> None:
        if self.failing:
            raise StoreError("no answer")
        super().write(path, data)


def test_a_renewal_that_fails_for_long_is_not_hidden(tmp_path: Path) -> None:
    store = _FailingStore(str(tmp_path))
    lease = Lease.acquire(store, "run-1", time_to_live=0.3, renewal_interval=0.05)

    def complaint() -> str | None:
        try:
            lease.check()
        except StoreError as error:
            return str(error)
        return None

    assert complaint() is None
    store.failing = True
    said = wait_for(complaint)
    assert re.fullmatch(r"the lease on run 'run-1' could not be renewed for \d+ s: no answer", said)
    store.failing = False
    wait_for(lambda: complaint() is None)
