"""`delete_run` leaves nothing, or a run that nobody can use until it is deleted."""

from collections.abc import Callable
from contextlib import suppress

import pytest

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import Holder, Outcome, newest_lease
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Parent, list_runs
from cairn.storage.store.errors import BeingDeleted, LeaseHeld, LeaseLost, SharedWithForks
from cairn.storage.store.local import LocalStore
from cairn.storage.store.store import Store
from cairn.storage.upkeep.collector import delete_run
from tests.storage.builders import CONFIG, commit_step, rollout_table


def _write_run(store: Store, run: str = "run-1") -> Ledger:
    ledger = Ledger.create(store, run, CONFIG)
    lease = ledger.acquire()
    for iteration in range(3):
        commit_step(ledger, iteration, Step.ROLLOUT, "00-000", table=rollout_table([iteration]))
    lease.release(Outcome.COMPLETED)
    return ledger


def _commits_and_files(store: Store) -> set[str]:
    """All but leases, which are renewed all the time."""
    return {path for path in store.find("runs") if "/leases/" not in path}


def test_nothing_of_a_deleted_run_is_left_and_another_run_is_whole(store: Store) -> None:
    _write_run(store)
    other = _write_run(store, "run-10")
    before = store.find(layout.run(other.run))
    delete_run(store, "run-1")
    assert store.find("runs") == before
    assert store.list("runs") == ["run-10/"]
    assert list_runs(store) == ["run-10"]
    with pytest.raises(FileNotFoundError, match="no run 'run-1'"):
        delete_run(store, "run-1")
    assert Ledger.create(store, "run-1", CONFIG).last_iteration() is None


def test_a_run_with_a_live_driver_is_left_alone(store: Store) -> None:
    ledger = _write_run(store)
    ledger.acquire()
    before = _commits_and_files(store)
    with pytest.raises(LeaseHeld):
        delete_run(store, "run-1")
    assert _commits_and_files(store) == before


def test_a_run_that_forks_share_is_left_alone(store: Store) -> None:
    _write_run(store)
    for name in ("fork-b", "fork-a"):
        Ledger.create(store, name, CONFIG, parent=Parent(run="run-1", iteration=1))
    before = set(store.find("runs"))
    with pytest.raises(SharedWithForks, match=r"fork-a \(up to iteration 1\), fork-b \(up to iteration 1\)"):
        delete_run(store, "run-1")
    assert set(store.find("runs")) == before
    for name in ("fork-a", "fork-b", "run-1"):
        delete_run(store, name)
    assert store.find("runs") == {}


class _Crash(Exception):
    pass


class _CrashingStore(LocalStore):
    """Dies at a deletion."""

    left = 10**6

    def delete(self, path: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise _Crash
        super().delete(path)


@pytest.mark.proof
def test_a_deletion_that_crashed_anywhere_can_be_finished_and_nothing_opens_the_run_until_then(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    moments = 0
    while True:
        store = _CrashingStore(str(tmp_path_factory.mktemp("store")))
        ledger = _write_run(store)
        store.left = moments
        try:
            delete_run(store, "run-1")
            break
        except _Crash:
            moments += 1
        store.left = 10**6
        with pytest.raises(BeingDeleted, match="`cairn delete run-1` resumes it"):
            Ledger.open(store, "run-1")
        with pytest.raises(BeingDeleted):
            Ledger.create(store, "run-1", ledger.manifest.config)
        assert list_runs(store) == ["run-1"]
        delete_run(store, "run-1")
        assert store.find("runs") == {}
    assert moments >= 9, "three commits, their files, the lease and the manifest"


def test_a_driver_whose_run_was_deleted_touches_nothing_of_the_next_run_of_that_name(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten = Ledger.create(store, "run-1", CONFIG)
    forgotten.acquire()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Holder, "is_gone", lambda holder: True)
        delete_run(store, "run-1")
    heir = Ledger.create(store, "run-1", CONFIG)
    heir.acquire()
    with pytest.raises(LeaseLost, match="'run-1' was deleted while this driver owned it"):
        commit_step(forgotten, 0, Step.SYNC)
    assert forgotten.lease is not None
    forgotten.lease.release(Outcome.FAILED)
    assert heir.find(0, Step.SYNC) is None
    state = newest_lease(store, "run-1")
    assert state is not None
    assert (state.epoch, state.outcome) == (1, None)


class _SuspendingStore(LocalStore):
    """Somebody is suspended right after a deletion."""

    left = 10**6
    meanwhile: Callable[[], None]

    def delete(self, path: str) -> None:
        super().delete(path)
        self.left -= 1
        if self.left == 0:
            self.meanwhile()


@pytest.mark.proof
def test_a_deletion_that_was_suspended_anywhere_touches_nothing_of_the_next_run_of_that_name(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.storage.upkeep.retention._TOGETHER", 1)
    monkeypatch.setattr(Holder, "is_gone", lambda holder: True)
    moments = 1
    while True:
        store = _SuspendingStore(str(tmp_path_factory.mktemp("store")))
        _write_run(store)
        there: list[set[str]] = []

        def another_finishes_it_and_the_name_is_given_again(
            store: _SuspendingStore = store, there: list[set[str]] = there
        ) -> None:
            if store.exists(layout.run_manifest("run-1")):
                delete_run(store, "run-1")
            _write_run(store)
            there.append(set(store.find("runs")))

        store.left, store.meanwhile = moments, another_finishes_it_and_the_name_is_given_again
        with suppress(LeaseLost):
            delete_run(store, "run-1")
        if not there:
            break
        assert set(store.find("runs")) == there[0], f"after {moments} files"
        assert [len(Ledger.open(store, "run-1").commits(index)) for index in range(3)] == [1, 1, 1]
        moments += 1
    assert moments >= 9
