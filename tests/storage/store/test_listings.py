"""What a listing says is no ground to stand on: strange names lie there, and names that exist may not be there yet."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cairn.configs.schema.operations import CheckpointConfig
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import Lease, Outcome, newest_lease
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import list_runs
from cairn.storage.logs.sample_log import SampleLog, waiting_groups
from cairn.storage.store.errors import LeaseHeld
from cairn.storage.store.local import LocalStore
from cairn.storage.store.s3 import S3Store
from cairn.storage.store.store import Store
from cairn.storage.upkeep.collector import Reason, collect, delete_run, garbage
from cairn.storage.upkeep.retention import forks, retire, retired
from cairn.storage.upkeep.verification import verify
from tests.storage.builders import CONFIG, commit_step, rollout_table
from tests.storage.upkeep.test_retention import _eleven_iterations, _iteration

KEEP = CheckpointConfig(save_interval=2, save_retain_interval=4, retain_snapshots=2)
FILES = (".DS_Store", ".nfs000000000001", "._train.json", "notes.json", "000099")
FOLDERS = ("lost+found", "my run", "0000001", "000001 copy")


def _litter(store: Store, attempt: str) -> None:
    """Strange files and folders wherever something is listed, and on S3 the marker that a browser makes of a folder."""
    in_run = ("leases", "iterations", "retired", "iterations/000010", "iterations/000010/rollout")
    waiting = f"iterations/000011/rollout/{attempt}"
    places = (*in_run, "iterations/000011/rollout", waiting, f"{waiting}/write_ahead")
    for folder in ("runs", "runs/run-1", *(f"runs/run-1/{place}" for place in places)):
        for name in FILES:
            store.write(f"{folder}/{name}", b"?")
        for name in FOLDERS:
            store.write(f"{folder}/{name}/some.json", b"{}")
        if isinstance(store, S3Store):
            store._s3.call_s3("put_object", Bucket=store._bucket, Key=store._key(folder) + "/", Body=b"")
        else:
            Path(store.url, folder, "back\\slash").mkdir()
            Path(store.url, folder, "line\nfeed").write_bytes(b"?")


def test_names_that_are_none_of_a_run_disturb_nothing(store: Store) -> None:
    clean = _eleven_iterations(store)
    attempt = clean.attempt(11, Step.ROLLOUT, "00-000")
    with SampleLog(attempt, "1" * 64) as log:
        log.append(rollout_table([11]))
    retire(clean, KEEP)
    commits = [commit.digest for index in clean.iterations() for commit in clean.commits(index)]
    gone, lease = retired(clean), newest_lease(store, "run-1")
    assert gone
    assert lease is not None
    _litter(store, attempt.name)

    ledger = Ledger.open(store, "run-1")
    assert list_runs(store) == ["run-1"]
    assert forks(store, "run-1") == {}
    assert (ledger.iterations(), ledger.last_iteration()) == (list(range(12)), 10)
    assert [commit.digest for index in range(12) for commit in ledger.commits(index)] == commits
    assert [finding for one in verify(ledger) for finding in one.findings] == []
    found = newest_lease(store, "run-1")
    assert found is not None
    assert (found.epoch, found.holder) == (lease.epoch, lease.holder)
    assert retired(ledger) == gone
    assert waiting_groups(store, "run-1", 11, (), 2) == 1
    with SampleLog(clean.attempt(11, Step.ROLLOUT, "00-000"), "1" * 64) as log:
        assert set(log.recover().column("group_id").to_pylist()) == {11}
    assert list(garbage(ledger)) == []
    _iteration(clean, 11, save=True)
    assert [one.iteration for one in retire(clean, KEEP)] == [9, 9]
    collect(ledger, garbage(ledger))
    assert clean.lease is not None
    clean.lease.release(Outcome.STOPPED)
    delete_run(store, "run-1")
    assert list_runs(store) == []
    assert not [path for path in store.find("runs") if path.startswith("runs/run-1/")]


class LaggingStore(LocalStore):
    """Its listings do not show what was written since `lag` was set; everything else does."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.lag = False
        self.fresh: set[str] = set()

    def write(self, path: str, data: bytes) -> None:
        self._note(path)
        super().write(path, data)

    def create(self, path: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
        self._note(path)
        return super().create(path, data, guard)

    def _note(self, path: str) -> None:
        if self.lag and not self.exists(path):
            self.fresh.add(path)

    def list(self, folder: str) -> list[str]:
        def is_old(name: str) -> bool:
            if not name.endswith("/"):
                return f"{folder}/{name}" not in self.fresh
            return any(path not in self.fresh for path in LocalStore.find(self, f"{folder}/{name[:-1]}"))

        return [name for name in super().list(folder) if is_old(name)]


@pytest.fixture
def lagging(tmp_path: Path) -> LaggingStore:
    return LaggingStore(str(tmp_path))


def test_a_lease_is_taken_after_the_newest_though_no_listing_shows_it(lagging: LaggingStore) -> None:
    Ledger.create(lagging, "run-1", CONFIG)
    lagging.lag = True
    first = Lease.acquire(lagging, "run-1")
    assert lagging.list(layout.leases("run-1")) == []
    with pytest.raises(LeaseHeld, match=f"pid {first.holder.pid}"):
        Lease.acquire(lagging, "run-1")
    assert Lease.acquire(lagging, "run-1", takeover=True).epoch == 2
    found = newest_lease(lagging, "run-1")
    assert found is not None
    assert found.epoch == 2


def test_commits_that_no_listing_shows_are_found_from_the_train_step(lagging: LaggingStore) -> None:
    ledger = Ledger.create(lagging, "run-1", CONFIG)
    ledger.acquire()
    _iteration(ledger, 0)
    lagging.lag = True
    _iteration(ledger, 1)
    assert lagging.list(layout.iteration("run-1", 1)) == []
    assert [commit.step for commit in ledger.commits(1)] == [Step.ROLLOUT, Step.FILTER, Step.TRAIN]


def test_no_committed_file_is_collected_because_its_commit_is_not_listed(lagging: LaggingStore) -> None:
    ledger = Ledger.create(lagging, "run-1", CONFIG)
    ledger.acquire()
    commit_step(ledger, 0, Step.ROLLOUT, "00-000", table=rollout_table([0]))
    commit_step(ledger, 0, Step.ROLLOUT, "00-001", table=rollout_table([1]))
    commit_step(ledger, 1, Step.ROLLOUT, "00-000", table=rollout_table([2]))
    lease = ledger.lease
    assert lease is not None
    lagging.fresh = {layout.commit("run-1", 0, Step.ROLLOUT, "00-001")}
    Lease.acquire(lagging, "run-1", takeover=True)  # so that the attempts are of no live driver
    assert list(garbage(ledger)) == []
    lagging.delete(layout.commit("run-1", 0, Step.ROLLOUT, "00-001"))
    assert [one.reason for one in garbage(ledger)] == [Reason.ABANDONED]


def test_snapshots_that_replay_needs_stay_though_the_commits_made_from_them_are_not_listed(
    lagging: LaggingStore,
) -> None:
    ledger = Ledger.create(lagging, "run-1", CONFIG)
    ledger.acquire()
    for index in range(6):
        _iteration(ledger, index, save=index == 5, waiting=(0,) if index == 5 else ())
    _iteration(ledger, 6, buffered=(0,), waiting=(1,))
    lagging.lag = True
    _iteration(ledger, 7, buffered=(1,))
    policy = CheckpointConfig(save_interval=6, retain_snapshots=2)
    assert {one.iteration for one in retire(ledger, policy)} == {0, 1, 2, 3, 4}
    assert not [one for one in verify(ledger) for finding in one.findings]
