"""`retention`: what a run may lose, that it loses nothing else, and that it says so."""

import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.configs.schema.operations import CheckpointConfig
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.layout import Kind
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Parent
from cairn.storage.ledger.publications import VALUE, Stored
from cairn.storage.ledger.schemas import FILTER
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.store.errors import Damaged, LeaseLost, Retired
from cairn.storage.store.local import LocalStore
from cairn.storage.store.store import Store
from cairn.storage.upkeep.collector import Reason, collect, garbage
from cairn.storage.upkeep.retention import (
    candidates,
    is_retired,
    newest_checkpoint,
    pin,
    require_restorable,
    retire,
    retired,
    unpin,
)
from cairn.storage.upkeep.verification import verify
from tests.flows.written_runs import filter_table
from tests.storage.builders import CONFIG, commit_step, rollout_table

FULL = {"full": True, "buffered": 0, "unfinished": 0}
EVERY_FOURTH = CheckpointConfig(save_interval=2, save_retain_interval=4, retain_snapshots=2)


def _iteration(
    ledger: Ledger,
    index: int,
    buffered: tuple[int, ...] = (),
    save: bool = False,
    waiting: tuple[int, ...] = (),
) -> None:
    """Rollout, filter (which takes over `buffered` groups of the iteration before, and leaves `waiting` ones to the
    next) and train; perhaps a checkpoint."""
    before = ledger.find(index - 1, Step.TRAIN) if index else None
    groups = rollout_table([3 * index + group for group in range(3)])
    rollout = commit_step(ledger, index, Step.ROLLOUT, "00-000", inputs=(before,) if before else (), table=groups)
    earlier = [ledger.find(index - 1, Step.ROLLOUT, "00-000") for _ in buffered[:1]]
    cuts = [ledger.find(index - 1, Step.FILTER, "00") for _ in buffered[:1]]
    rows = filter_table(index, buffered, waiting)
    selection = commit_step(
        ledger,
        index,
        Step.FILTER,
        "00",
        inputs=(*(cut for cut in cuts if cut is not None), rollout),
        table=rows.set_column(2, FILTER.field("shard"), [["00-000"] * rows.num_rows]),
        values=FULL,
    )
    sources = [commit for commit in (*earlier, before) if commit is not None]
    trained = commit_step(ledger, index, Step.TRAIN, inputs=(*sources, selection, rollout))
    if save:
        commit_step(ledger, index, Step.CHECKPOINT, inputs=(trained,), table=rollout_table([0]))


def _eleven_iterations(store: Store) -> Ledger:
    """Ten iterations, every second with a checkpoint, and an eleventh without; owned by this process."""
    if isinstance(store, LocalStore):
        shutil.copytree(_written_once().name, store.root, dirs_exist_ok=True)
        ledger = Ledger.open(store, "run-1")
        ledger.acquire()
        return ledger
    return _write_eleven_iterations(store)


def _write_eleven_iterations(store: Store) -> Ledger:
    ledger = Ledger.create(store, "run-1", CONFIG)
    ledger.acquire()
    for index in range(11):
        _iteration(ledger, index, save=index % 2 == 1)
    return ledger


@cache
def _written_once() -> "tempfile.TemporaryDirectory[str]":
    """A folder with them, owned by nobody, for tests to copy: each file of a store is written through to the disk."""
    folder = tempfile.TemporaryDirectory()
    lease = _write_eleven_iterations(LocalStore(folder.name)).lease
    assert lease is not None
    lease.release(Outcome.STOPPED)
    return folder


@pytest.fixture
def ledger(store: Store) -> Ledger:
    """On each kind of store."""
    return _eleven_iterations(store)


def _retained(ledger: Ledger, step: Step) -> list[int]:
    """Iterations whose file of a step is there."""
    files = ledger.store.find(layout.iterations(ledger.run))
    commits = [commit for index in ledger.iterations() for commit in ledger.commits(index) if commit.step is step]
    return [commit.iteration for commit in commits if layout.in_run(commit.run, commit.outputs[0].path) in files]


def _rollout(ledger: Ledger, iteration: int) -> Commit:
    commit = ledger.find(iteration, Step.ROLLOUT, "00-000")
    assert commit is not None
    return commit


def test_every_kth_checkpoint_and_the_newest_stay_and_the_newest_snapshots(ledger: Ledger) -> None:
    retire(ledger, EVERY_FOURTH)
    assert _retained(ledger, Step.CHECKPOINT) == [3, 7, 9]
    assert _retained(ledger, Step.ROLLOUT) == [9, 10]
    assert retire(ledger, EVERY_FOURTH, everything=True) == [], "nothing is left to retire"


def test_what_is_retired_is_no_finding_and_a_reader_is_told_so(ledger: Ledger) -> None:
    gone = retire(ledger, EVERY_FOURTH)
    checks = list(verify(ledger))
    assert [finding for one in checks for finding in one.findings] == []
    assert sum(one.retired for one in checks) == sum(len(one.files) for one in gone) == 2 + 2 * 9
    commit = _rollout(ledger, 3)
    with pytest.raises(Retired, match=r"iterations/000003/rollout/.* is retired"):
        read_table(ledger.store, commit.run, commit.outputs[0])


def test_a_file_that_is_missing_though_not_retired_is_damage_still(ledger: Ledger) -> None:
    retire(ledger, EVERY_FOURTH)
    commit = _rollout(ledger, 10)
    ledger.store.delete(path := layout.in_run(commit.run, commit.outputs[0].path))
    assert [finding.path for one in verify(ledger) for finding in one.findings] == [path]
    with pytest.raises(Damaged, match="missing"):
        read_table(ledger.store, commit.run, commit.outputs[0])


def test_without_options_or_without_a_checkpoint_nothing_goes(store: Store, ledger: Ledger) -> None:
    assert retire(ledger, CheckpointConfig(save_interval=2), everything=True) == []
    other = Ledger.create(store, "run-2", CONFIG)
    other.acquire()
    for index in range(6):
        _iteration(other, index)
    assert retire(other, EVERY_FOURTH, everything=True) == []


def test_snapshots_that_replay_begins_with_stay_however_old_they_are(store: Store) -> None:
    """The checkpoint is iteration 1's; iteration 2 trained on groups that iteration 1 left."""
    ledger = Ledger.create(store, "run-1", CONFIG)
    ledger.acquire()
    for index in range(8):
        _iteration(ledger, index, buffered=(0,) if index == 2 else (), save=index == 1)
    retire(ledger, CheckpointConfig(save_interval=2, retain_snapshots=2), everything=True)
    assert _retained(ledger, Step.ROLLOUT) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("waits", ["buffer", "continue"])
def test_snapshots_of_groups_that_wait_stay(store: Store, waits: str) -> None:
    """The newest selection, at the checkpoint, holds groups of iteration 2."""
    ledger = Ledger.create(store, "run-1", CONFIG)
    ledger.acquire()
    for index in range(7):
        _iteration(ledger, index)
    rows = filter_table(3, buffered=(0,)).set_column(4, "disposition", [[waits] * 4])
    commit_step(ledger, 7, Step.FILTER, "00", table=rows, values=FULL)
    commit_step(ledger, 7, Step.CHECKPOINT, table=rollout_table([0]))
    retire(ledger, CheckpointConfig(save_interval=1, retain_snapshots=2), everything=True)
    assert _retained(ledger, Step.ROLLOUT) == [2, 3, 6]


def test_what_a_fork_shares_stays_whole(store: Store, ledger: Ledger) -> None:
    Ledger.create(store, "fork", CONFIG, parent=Parent(run="run-1", iteration=4))
    gone = retire(ledger, EVERY_FOURTH)
    assert min(one.iteration for one in gone) == 5
    assert _retained(ledger, Step.CHECKPOINT) == [1, 3, 7, 9]
    assert _retained(ledger, Step.ROLLOUT) == [0, 1, 2, 3, 4, 9, 10]


@pytest.mark.parametrize("iteration", [3, 7, 9, 10])
def test_where_files_are_left_a_run_can_be_forked(ledger: Ledger, iteration: int) -> None:
    retire(ledger, EVERY_FOURTH)
    require_restorable(ledger, iteration)


@pytest.mark.parametrize(
    ("iteration", "gone"),
    [(1, "its checkpoint is retired"), (4, "snapshots of iteration 4"), (8, "snapshots of iteration 8")],
)
def test_where_they_are_not_a_fork_is_refused(ledger: Ledger, iteration: int, gone: str) -> None:
    retire(ledger, EVERY_FOURTH)
    with pytest.raises(Retired, match=f"'run-1' cannot be forked at iteration {iteration}: .*{gone}"):
        require_restorable(ledger, iteration)


class _ForkingStore(LocalStore):
    """Someone forks the run at iteration 6 while the first marker is written."""

    armed = False

    def create(self, path: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
        if self.armed and "/retired/" in path:
            self.armed = False
            Ledger.create(self, "fork", CONFIG, parent=Parent(run="run-1", iteration=6))
        return super().create(path, data, guard)


def test_what_brings_a_pinned_iteration_back_stays_and_goes_when_it_is_unpinned(tmp_path: Path) -> None:
    """Iteration 5 has a checkpoint of its own; that of 4 is 3, kept anyway, with the snapshots of 4."""
    ledger = _eleven_iterations(LocalStore(str(tmp_path)))
    pin(ledger, 5)
    pin(ledger, 4, by="ada", why="shipped")
    retire(ledger, EVERY_FOURTH, everything=True)
    assert _retained(ledger, Step.CHECKPOINT) == [3, 5, 7, 9]
    assert _retained(ledger, Step.ROLLOUT) == [4, 5, 9, 10]
    require_restorable(ledger, 4)
    require_restorable(ledger, 5)
    collect(ledger, garbage(ledger))
    assert _retained(ledger, Step.ROLLOUT) == [4, 5, 9, 10]
    unpin(ledger, 5)
    retire(ledger, EVERY_FOURTH, everything=True)
    assert _retained(ledger, Step.CHECKPOINT) == [3, 7, 9]
    assert _retained(ledger, Step.ROLLOUT) == [4, 9, 10]


def test_what_is_gone_or_not_there_yet_cannot_be_pinned(tmp_path: Path) -> None:
    ledger = _eleven_iterations(LocalStore(str(tmp_path)))
    retire(ledger, EVERY_FOURTH)
    with pytest.raises(
        Retired, match="iteration 5 of run 'run-1' cannot be pinned: that needs the snapshots of iterat"
    ):
        pin(ledger, 5)
    with pytest.raises(ValueError, match="has not trained iteration 11 yet"):
        pin(ledger, 11)
    with pytest.raises(ValueError, match="iteration 9 of run 'run-1' is not pinned"):
        unpin(ledger, 9)
    fork = Ledger.create(ledger.store, "fork", CONFIG, parent=Parent(run="run-1", iteration=9))
    with pytest.raises(ValueError, match="belongs to 'run-1': pin it there"):
        pin(fork, 9)
    assert ledger.decisions.all() == ()


class _PinningStore(LocalStore):
    """Someone pins iteration 5 while the first marker is written."""

    armed = False

    def create(self, path: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
        if self.armed and "/retired/" in path:
            self.armed = False
            pin(Ledger.open(self, "run-1"), 5)
        return super().create(path, data, guard)


def test_a_pin_set_while_files_are_retired_keeps_them(tmp_path: Path) -> None:
    store = _PinningStore(str(tmp_path))
    ledger = _eleven_iterations(store)
    store.armed = True
    retire(ledger, EVERY_FOURTH)
    collect(ledger, garbage(ledger))
    assert _retained(ledger, Step.CHECKPOINT) == [3, 5, 7, 9]
    assert _retained(ledger, Step.ROLLOUT) == [5, 9, 10]
    assert not {(5, kind) for kind in Kind} & retired(ledger)


def test_a_fork_made_while_files_are_retired_keeps_them(tmp_path: Path) -> None:
    store = _ForkingStore(str(tmp_path))
    ledger = _eleven_iterations(store)
    store.armed = True
    retire(ledger, EVERY_FOURTH)
    collect(ledger, garbage(ledger))
    assert _retained(ledger, Step.ROLLOUT) == [0, 1, 2, 3, 4, 5, 6, 9, 10]
    assert _retained(ledger, Step.CHECKPOINT) == [1, 3, 5, 7, 9]
    assert min(iteration for iteration, _ in retired(ledger)) == 7
    require_restorable(Ledger.open(store, "fork"), 6)


class _Crash(Exception):
    pass


def test_a_crash_before_a_marker_is_taken_back_costs_a_fork_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _ForkingStore(str(tmp_path))
    ledger = _eleven_iterations(store)
    store.armed = True
    with monkeypatch.context() as crashing:
        crashing.setattr(LocalStore, "delete", lambda store, path: (_ for _ in ()).throw(_Crash))
        with pytest.raises(_Crash):
            retire(ledger, EVERY_FOURTH)
    assert (5, Kind.CHECKPOINT) in retired(ledger)
    fork, saved = Ledger.open(store, "fork"), ledger.find(5, Step.CHECKPOINT)
    assert saved is not None
    assert not is_retired(fork, saved)
    assert is_retired(ledger, saved)
    store.delete(layout.in_run("run-1", saved.outputs[0].path))
    assert is_retired(fork, saved)


class _CrashingStore(LocalStore):
    """Dies at the given deletion."""

    left = 1000

    def delete(self, path: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise _Crash
        super().delete(path)


@pytest.mark.parametrize("deletions", [0, 1, 7])
@pytest.mark.proof
def test_a_crash_between_marker_and_last_file_leaves_what_the_collector_finishes(
    tmp_path: Path, deletions: int
) -> None:
    store = _CrashingStore(str(tmp_path))
    ledger = _eleven_iterations(store)
    store.left = deletions
    with pytest.raises(_Crash):
        retire(ledger, EVERY_FOURTH)
    store.left = 1000
    assert [finding for one in verify(ledger) for finding in one.findings] == []
    left = list(garbage(ledger))
    assert {one.reason for one in left} == {Reason.RETIRED}
    collect(ledger, left)
    assert _retained(ledger, Step.CHECKPOINT) == [3, 7, 9]
    assert _retained(ledger, Step.ROLLOUT) == [9, 10]


def test_a_driver_looks_only_as_far_back_as_the_last_that_is_retired(ledger: Ledger) -> None:
    retire(ledger, EVERY_FOURTH)
    ledger.store.delete(layout.retired(ledger.run, 2, Kind.SNAPSHOTS))
    assert retire(ledger, EVERY_FOURTH) == []
    assert (2, Kind.SNAPSHOTS) not in retired(ledger)


@given(
    save_interval=st.integers(1, 4),
    multiple=st.integers(1, 4),
    snapshots=st.integers(2, 6),
    newest=st.integers(0, 30),
    back=st.integers(0, 30),
    first=st.integers(0, 10),
)
def test_recovery_never_lacks_anything(
    save_interval: int, multiple: int, snapshots: int, newest: int, back: int, first: int
) -> None:
    config = CheckpointConfig(
        save_interval=save_interval, save_retain_interval=multiple * save_interval, retain_snapshots=snapshots
    )
    checkpoint = max(0, newest - back)
    found = set(candidates(config, newest=newest, checkpoint=checkpoint, needed=(checkpoint - 1,), first=first))
    assert all(iteration >= first for iteration, _ in found)
    assert all(iteration < checkpoint for iteration, kind in found if kind is Kind.CHECKPOINT)
    last = min(checkpoint, newest - snapshots, newest - 2)
    expected = set(range(first, last + 1)) - {checkpoint - 1}
    assert {iteration for iteration, kind in found if kind is Kind.SNAPSHOTS} == expected


class _TakenOver(LocalStore):
    """Another driver takes the run over, once so many files were created or deleted by this one's retirement."""

    left = 10**6

    def create(self, path: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
        created = super().create(path, data, guard)
        if "/retired/" in path:
            self._count()
        return created

    def delete(self, path: str) -> None:
        super().delete(path)
        self._count()

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            Ledger.open(LocalStore(self.url), "run-1").acquire(takeover=True)


@pytest.mark.proof
def test_a_driver_that_was_taken_over_while_it_retires_files_touches_no_more(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.storage.upkeep.retention._TOGETHER", 1)
    whole = tmp_path_factory.mktemp("whole")
    _eleven_iterations(LocalStore(str(whole)))
    moments = 0
    while True:
        store = _TakenOver(str(shutil.copytree(whole, tmp_path_factory.mktemp("store"), dirs_exist_ok=True)))
        ledger = Ledger.open(store, "run-1")
        ledger.acquire(takeover=True)
        before = set(store.find(layout.RUNS))
        store.left = moments
        if not moments:
            Ledger.open(store, "run-1").acquire(takeover=True)
        if _outlives(ledger):
            break
        after = set(store.find(layout.RUNS))
        touched = {path for path in before ^ after if "/leases/" not in path}
        assert len(touched) == moments
        moments += 1
    assert moments > 2 * 9


def _outlives(ledger: Ledger) -> bool:
    """Whether a driver retires files and is not told that it has lost the run."""
    try:
        retire(ledger, EVERY_FOURTH)
    except LeaseLost:
        return False
    return True


def _with_weights(store: Store, iterations: int, whole: int) -> Ledger:
    """A run that stores its weights, whole in every `whole`-th iteration, with the checkpoint."""
    ledger = Ledger.create(store, "run-1", {**CONFIG, "checkpoint": {"store_weights": None}})
    ledger.acquire()
    for index in range(iterations):
        _iteration(ledger, index, save=index % whole == 0)
        before = ledger.find(index - 1, Step.SYNC) if index % whole else None
        how = Stored(whole_bytes=1)
        if before is not None:
            how = Stored(base=before.name, base_digest=before.digest, differences=index % whole, whole_bytes=1)
        values: dict[str, Any] = {"digest": "0", VALUE: how.model_dump(exclude_none=True)}
        commit_step(ledger, index, Step.SYNC, table=rollout_table([0]), values=values)
    return ledger


def test_weights_stay_as_long_as_those_that_are_differences_to_them(store: Store) -> None:
    ledger = _with_weights(store, 10, whole=4)
    policy = CheckpointConfig(save_interval=1, retain_weights=3)
    for newest, oldest in ((10, 4), (11, 8), (12, 8)):
        for index in range(len(ledger.iterations()), newest):
            _iteration(ledger, index, save=index % 4 == 0)
            before = ledger.find(index - 1, Step.SYNC)
            assert before is not None
            how = Stored(base=before.name, base_digest=before.digest, differences=index % 4, whole_bytes=1)
            values: dict[str, Any] = {"digest": "0", VALUE: how.model_dump(exclude_none=True)}
            commit_step(ledger, index, Step.SYNC, table=rollout_table([0]), values=values)
        assert {one.kind for one in retire(ledger, policy)} <= {Kind.WEIGHTS}
        assert _retained(ledger, Step.SYNC) == list(range(oldest, newest))
    assert _retained(ledger, Step.ROLLOUT) == list(range(12))
    assert [finding for one in verify(ledger) for finding in one.findings] == []
    assert {one.reason for one in garbage(ledger)} == set()


def test_pinned_weights_and_forked_ones_stay_with_all_that_they_need(store: Store) -> None:
    ledger = _with_weights(store, 14, whole=4)
    Ledger.create(store, "fork", CONFIG, parent=Parent(run="run-1", iteration=1))
    pin(ledger, 6)
    retire(ledger, CheckpointConfig(save_interval=1, retain_weights=1))
    assert _retained(ledger, Step.SYNC) == [0, 1, 4, 5, 6, 12, 13]
    unpin(ledger, 6)
    retire(ledger, CheckpointConfig(save_interval=1, retain_weights=1), everything=True)
    assert _retained(ledger, Step.SYNC) == [0, 1, 12, 13]
    pin(ledger, 6)  # its checkpoint and snapshots are there, which suffices


@given(
    interval=st.sampled_from([None, 1, 3]),
    drivers=st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), min_size=1, max_size=3),
)
@settings(max_examples=10, deadline=None)
def test_the_newest_checkpoint_is_found_though_drivers_are_killed_and_preempted(
    interval: int | None, drivers: list[tuple[int, bool, bool]]
) -> None:
    """Drivers: their updates, whether they are killed while they write the last checkpoint, and whether they leave one
    where none is due."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.create(LocalStore(folder), "run-1", {"checkpoint": {"save_interval": interval}})
        begin, saved = 0, list[int]()
        for updates, killed, preempted in drivers:
            lease = ledger.acquire()
            end = begin + updates
            for index in range(begin, end):
                commit_step(ledger, index, Step.TRAIN)
                if interval is not None and (index + 1) % interval == 0 and not (killed and index + 1 == end):
                    commit_step(ledger, index, Step.CHECKPOINT)
                    saved.append(index)
            if preempted and not killed and end - 1 not in saved:
                commit_step(ledger, end - 1, Step.CHECKPOINT)
                saved.append(end - 1)
            lease.release(Outcome.STOPPED)
            begin = end
        reader = Ledger.open(LocalStore(folder), "run-1")
        for last in range(begin + 1):
            found = newest_checkpoint(reader, last)
            assert (None if found is None else found.iteration) == max((i for i in saved if i <= last), default=None)


def test_the_newest_checkpoint_is_found_in_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger.create(LocalStore(str(tmp_path)), "run-1", {"checkpoint": {"save_interval": 40}})
    for epoch, updates in enumerate([range(10), range(10, 40), range(40, 55), range(55, 79)]):
        lease = ledger.acquire()
        assert lease.epoch == epoch + 1
        for index in updates:
            commit_step(ledger, index, Step.TRAIN)
            if index in (9, 39):
                commit_step(ledger, index, Step.CHECKPOINT)
        lease.release(Outcome.STOPPED)
    reads, read = list[str](), LocalStore.read
    monkeypatch.setattr(LocalStore, "read", lambda store, path: reads.append(path) or read(store, path))
    for last, expected, most in [(38, 9, 10), (9, 9, 1), (53, 39, 4), (78, 39, 15)]:
        reads.clear()
        found = newest_checkpoint(ledger, last)
        assert found is not None
        assert (found.iteration, len(reads) <= most) == (expected, True), reads
