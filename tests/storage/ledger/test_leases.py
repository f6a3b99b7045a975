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

import psutil
import pytest

from cairn.storage.ledger import layout, leases
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import TIME_TO_LIVE, Holder, Lease, Outcome, newest_lease
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.store import canonical
from cairn.storage.store.errors import LeaseHeld, StoreError
from cairn.storage.store.local import LocalStore
from cairn.storage.store.store import Store
from tests.waiting import wait_for

pytestmark = pytest.mark.contract

_DRIVER = """
import sys, time
sys.path.insert(0, {root!r})
from cairn.storage.store.errors import LeaseLost
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from tests.storage.builders import commit_step
ledger = Ledger.open(open_store(sys.argv[1]), "run-1")
print(ledger.acquire().epoch, flush=True)
"""
_COMMIT_ON_REQUEST = """
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

    def __init__(self, store: Store, then: str = _COMMIT_ON_REQUEST):
        code = _DRIVER.format(root=str(Path(__file__).parents[3])) + then
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


@pytest.mark.proof
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


@pytest.mark.proof
def test_the_renewal_does_not_keep_a_process_alive(ledger: Ledger) -> None:
    driver = Driver(ledger.store, then="")
    assert driver.process.wait(timeout=120) == 0
    driver.close()
    assert ledger.acquire().epoch == 2


def test_no_step_of_the_wall_clock_kills_or_revives_a_holder_on_this_machine(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock's steps show in the time of day and, in what the kernel derives from it, in every process's start."""
    Lease.acquire(store, "run-1")
    now, started = time.time, psutil.Process.create_time
    for step in (-86400.0, 3.0, 86400.0):
        monkeypatch.setattr(time, "time", lambda step=step: now() + step)
        monkeypatch.setattr(psutil.Process, "create_time", lambda process, step=step: started(process) + step)
        with pytest.raises(LeaseHeld):
            Lease.acquire(store, "run-1")


def test_a_process_with_the_number_of_a_dead_one_is_not_taken_for_it() -> None:
    holder = Holder.this_process()
    assert holder.is_gone() is False
    assert holder.start_ticks is not None
    earlier = holder.model_copy(update={"start_ticks": holder.start_ticks - 1})
    assert earlier.is_gone() is True
    in_another_container = holder.model_copy(update={"machine": f"{holder.machine.split()[0]} 1"})
    assert in_another_container.is_gone() is None


def test_a_holder_is_not_dead_to_who_counts_time_otherwise() -> None:
    look = (
        "import sys; from cairn.storage.ledger.leases import Holder; "
        "print(Holder.model_validate_json(sys.argv[1]).is_gone())"
    )
    elsewhere = ["unshare", "--user", "--map-root-user", "--time", "--boottime", "1000", "--fork"]
    if subprocess.run([*elsewhere, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no time namespace can be made here")
    command = [*elsewhere, sys.executable, "-c", look, Holder.this_process().model_dump_json()]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "None\n"


def test_a_holder_of_an_earlier_version_is_known_by_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = Holder.this_process().model_dump(mode="json")
    del fields["start_ticks"]
    holder = Holder.model_validate(fields)
    assert holder.is_gone() is False
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert holder.model_copy(update={"pid": ended.pid}).is_gone() is True
    started = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: started(process) + 3)
    assert holder.is_gone() is None, "another process, or another clock: its renewals tell"


def _lease_from_elsewhere(store: Store, clock: float = 0.0, time_to_live: float = 0.4) -> None:
    """By a holder whose clock is so many seconds ahead."""
    holder = Holder.this_process().model_copy(update={"host": "elsewhere", "machine": "another boot"})
    lease = {
        "run": "run-1",
        "epoch": 1,
        "holder": holder.model_dump(mode="json"),
        "acquired_at": time.time() + clock,
        "time_to_live": time_to_live,
    }
    assert store.create(layout.lease_file(layout.leases("run-1"), 1), canonical.seal(lease))


def test_a_driver_elsewhere_that_leaves_its_lease_as_it_is_for_its_time_to_live_is_dead(store: Store) -> None:
    """Although its clock says that the lease is of the next hour."""
    _lease_from_elsewhere(store, clock=3600.0)
    began = time.monotonic()
    assert Lease.acquire(store, "run-1").epoch == 2
    assert time.monotonic() - began >= 0.4


def test_a_driver_elsewhere_is_alive_while_it_renews(store: Store) -> None:
    """Although its clock says that its last renewal was an hour ago."""
    clock = -3600.0
    _lease_from_elsewhere(store, clock, time_to_live=60)
    ended = threading.Event()

    def renew() -> None:
        renewals = 0
        while not ended.wait(0.1):
            renewals += 1
            sign = canonical.seal({"renewals": renewals, "renewed_at": time.time() + clock})
            store.write(layout.lease_file(layout.leases("run-1"), 1, ".renewed"), sign)

    renewer = threading.Thread(target=renew)
    renewer.start()
    try:
        with pytest.raises(LeaseHeld, match="on elsewhere since"):
            Lease.acquire(store, "run-1")
    finally:
        ended.set()
        renewer.join()


def test_a_driver_elsewhere_that_ends_while_it_is_watched_is_succeeded_at_once(store: Store) -> None:
    _lease_from_elsewhere(store, time_to_live=600)
    end = canonical.seal({"outcome": Outcome.PREEMPTED, "renewed_at": time.time()})
    threading.Timer(0.2, lambda: store.create(layout.lease_file(layout.leases("run-1"), 1, ".end"), end)).start()
    assert Lease.acquire(store, "run-1").epoch == 2


@pytest.mark.proof
def test_a_driver_elsewhere_that_renews_while_a_look_takes_long_is_alive(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lease_from_elsewhere(store, time_to_live=1.0)
    read, looks = store.read, []

    def read_slowly(path: str) -> bytes:
        found = None if path == layout.lease_file(layout.leases("run-1"), 1, ".end") else read(path)
        if found is None:  # last of each look; the second one hangs until the time is up
            looks.append(path)
            if len(looks) == 2:
                sign = canonical.seal({"renewals": 1, "renewed_at": time.time()})
                store.write(layout.lease_file(layout.leases("run-1"), 1, ".renewed"), sign)
                time.sleep(1.2)
            raise FileNotFoundError(path)
        return found

    monkeypatch.setattr(store, "read", read_slowly)
    with pytest.raises(LeaseHeld):
        Lease.acquire(store, "run-1")


def test_a_driver_that_took_the_run_at_the_end_of_the_watch_keeps_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lease_from_elsewhere(store)
    watch, faster = leases._is_silent, []

    def watch_and_be_late(store: Store, owned: leases.LeaseSubject, seen: leases.LeaseState) -> bool:
        silent = watch(store, owned, seen)
        if not faster:
            faster.append(Lease.acquire(store, "run-1", takeover=True))
        return silent

    monkeypatch.setattr(leases, "_is_silent", watch_and_be_late)
    with pytest.raises(LeaseHeld):
        Lease.acquire(store, "run-1")
    faster[0].check()


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
