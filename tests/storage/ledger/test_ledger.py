"""The promises of the ledger, on every kind of store."""

import math
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Parent, list_runs
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.store.errors import Damaged, LeaseHeld, LeaseLost, RunDiffers
from cairn.storage.store.local import LocalStore
from cairn.storage.store.store import Store
from tests.storage.builders import CONFIG, ENVIRONMENT, commit_step, rollout_table

pytestmark = pytest.mark.contract


@pytest.fixture
def ledger(store: Store) -> Ledger:
    ledger = Ledger.create(store, "run-1", CONFIG, {"data": "d" * 64})
    ledger.acquire()
    return ledger


def test_a_run_is_created_once_and_opened_afterwards(store: Store) -> None:
    created = Ledger.create(store, "run-1", CONFIG, {"data": "1"})
    assert Ledger.create(store, "run-1", CONFIG, {"data": "1"}).manifest == created.manifest
    assert Ledger.open(store, "run-1").manifest == created.manifest
    assert created.manifest.config == CONFIG
    assert list_runs(store) == ["run-1"]
    with pytest.raises(FileNotFoundError, match="there is no run 'absent'"):
        Ledger.open(store, "absent")


def test_another_configuration_is_refused_with_every_difference(store: Store) -> None:
    Ledger.create(store, "run-1", CONFIG, {"data": "1"})
    other = {"seed": 1, "training": {"lr": 0.5, "betas": [0.9, 0.98], "optimizer": "adam"}}
    with pytest.raises(RunDiffers) as caught:
        Ledger.create(store, "run-1", other, {"data": "2"})
    assert caught.value.differences == [
        ("training.lr", 1e-6, 0.5),
        ("training.optimizer", None, "adam"),
        ("digest of data", "1", "2"),
    ]
    assert "training.lr is 1e-06 in the ledger, 0.5 now" in str(caught.value)


def test_of_racing_creators_with_different_configurations_one_defines_the_run(store: Store) -> None:
    def create(seed: int) -> int | None:
        try:
            return Ledger.create(store, "run-1", {"seed": seed}).manifest.config["seed"]  # type: ignore[return-value]
        except RunDiffers:
            return None

    with ThreadPoolExecutor(6) as pool:
        winners = [seed for seed in pool.map(create, range(6)) if seed is not None]
    assert len(winners) == 1
    assert Ledger.open(store, "run-1").manifest.config == {"seed": winners[0]}


def test_a_commit_reads_back_equal_with_all_it_holds(ledger: Ledger) -> None:
    table = rollout_table([3, 4])
    assert ledger.find(0, Step.ROLLOUT, "00-000") is None
    rollout = commit_step(ledger, 0, Step.ROLLOUT, "00-000", table=table, values={"cursor": 12, "deep": [{"a": None}]})
    trained = commit_step(
        ledger,
        0,
        Step.TRAIN,
        inputs=(rollout,),
        metrics={"loss": math.nan, "grad_norm": math.inf, "kl": 0.1 + 0.2, "count": 3},
        timings={"run": 1.5},
        weight_version_in=0,
        weight_version_out=2,
        state_digest="s" * 64,
    )
    assert trained.inputs == {"000000/rollout.00-000": rollout.digest}
    found = ledger.find(0, Step.TRAIN)
    assert found is not None
    assert found.digest == trained.digest
    assert math.isnan(found.metrics.pop("loss"))
    assert found.metrics == {"grad_norm": math.inf, "kl": 0.1 + 0.2, "count": 3.0}
    stored = ledger.find(0, Step.ROLLOUT, "00-000")
    assert stored == rollout
    assert stored.outputs[0].rows == 4
    assert read_table(ledger.store, ledger.run, stored.outputs[0]).equals(table)


def test_the_first_commit_wins_and_the_other_driver_adopts_it(ledger: Ledger) -> None:
    with ThreadPoolExecutor(6) as pool:
        commits = list(pool.map(lambda index: commit_step(ledger, 0, Step.SYNC, values={"index": index}), range(6)))
    assert len({commit.digest for commit in commits}) == 1
    assert ledger.find(0, Step.SYNC) == commits[0]


def test_commits_of_an_iteration_come_in_the_order_of_the_dag(ledger: Ledger) -> None:
    for step, shard in ((Step.TRAIN, None), (Step.ROLLOUT, "00-001"), (Step.FILTER, "00"), (Step.ROLLOUT, "00-000")):
        commit_step(ledger, 5, step, shard)
    assert [commit.name for commit in ledger.commits(5)] == [
        "000005/rollout.00-000",
        "000005/rollout.00-001",
        "000005/filter.00",
        "000005/train",
    ]
    assert ledger.commits(6) == []


def test_the_last_iteration_is_the_newest_with_a_commit(ledger: Ledger) -> None:
    assert ledger.last_iteration() is None
    for iteration in (0, 1, 2):
        commit_step(ledger, iteration, Step.SYNC)
    ledger.store.write(ledger.attempt(3, Step.ROLLOUT, "00-000").path("part"), b"x")
    assert ledger.iterations() == [0, 1, 2, 3]
    assert ledger.last_iteration() == 2


def test_files_without_a_commit_do_not_exist(ledger: Ledger) -> None:
    ledger.attempt(0, Step.ROLLOUT, "00-000").write_table("samples.parquet", rollout_table([1]))
    assert ledger.find(0, Step.ROLLOUT, "00-000") is None
    assert ledger.commits(0) == []


def test_without_the_lease_nothing_is_committed(store: Store) -> None:
    ledger = Ledger.create(store, "run-1", CONFIG)
    with pytest.raises(LeaseLost, match="does not own run 'run-1'"):
        commit_step(ledger, 0, Step.SYNC)
    lease = ledger.acquire()
    with pytest.raises(LeaseHeld, match="take the run over with --takeover"):
        Ledger.open(store, "run-1").acquire()
    successor = Ledger.open(store, "run-1")
    successor.acquire(takeover=True)
    with pytest.raises(LeaseLost, match="was taken over by pid"):
        commit_step(ledger, 0, Step.SYNC)
    assert successor.find(0, Step.SYNC) is None
    assert commit_step(successor, 0, Step.SYNC).epoch == lease.epoch + 1
    successor.lease.release(Outcome.COMPLETED)  # type: ignore[union-attr]
    with pytest.raises(LeaseLost, match="released run 'run-1'"):
        commit_step(successor, 1, Step.SYNC)


def test_any_changed_byte_of_a_commit_is_damage(ledger: Ledger) -> None:
    commit = commit_step(ledger, 0, Step.TRAIN, metrics={"loss": 0.5}, values={"text": "Zähler"})
    path = layout.commit(ledger.run, 0, Step.TRAIN)
    data = ledger.store.read(path)
    assert Commit.from_bytes(data, path) == commit
    for position in range(len(data)):
        for changed in (data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :], data[:position]):
            with pytest.raises(Damaged, match=r"iterations/000000/train\.json cannot be trusted"):
                Commit.from_bytes(changed, path)


def test_a_damaged_commit_or_manifest_is_an_error_that_names_it(ledger: Ledger) -> None:
    commit_step(ledger, 0, Step.TRAIN)
    for path in (layout.commit(ledger.run, 0, Step.TRAIN), layout.run_manifest(ledger.run)):
        data = ledger.store.read(path)
        ledger.store.write(path, data.replace(b'"run-1"', b'"run-2"'))
    with pytest.raises(Damaged, match=r"runs/run-1/iterations/000000/train\.json"):
        ledger.find(0, Step.TRAIN)
    with pytest.raises(Damaged, match=r"runs/run-1/run\.json"):
        Ledger.open(ledger.store, "run-1")


def test_a_commit_copied_to_another_place_is_damage(ledger: Ledger) -> None:
    commit_step(ledger, 0, Step.TRAIN)
    data = ledger.store.read(layout.commit(ledger.run, 0, Step.TRAIN))
    ledger.store.write(layout.commit(ledger.run, 1, Step.TRAIN), data)
    with pytest.raises(Damaged, match="is in the wrong place: it names 000000/train"):
        ledger.find(1, Step.TRAIN)


def test_names_cannot_leave_their_folders(store: Store, ledger: Ledger) -> None:
    for name in ("..", "../other", "a/b", "", ".hidden", "a..b", "a b", "ä", "a" * 101, "a\n"):
        with pytest.raises(ValueError, match="is not a usable name"):
            Ledger.create(store, name, CONFIG)
        with pytest.raises(ValueError, match="is not a usable name"):
            ledger.find(0, Step.EVAL, name)
    with pytest.raises(ValueError, match="not between 0 and 999999"):
        ledger.find(-1, Step.EVAL)


def test_the_longest_shard_name_can_be_committed(ledger: Ledger) -> None:
    shard = "s" * 100
    assert commit_step(ledger, 999_999, Step.EVAL, shard, table=rollout_table([1])).name == f"999999/eval.{shard}"
    assert ledger.find(999_999, Step.EVAL, shard) is not None


def test_outputs_cannot_leave_the_run(ledger: Ledger) -> None:
    attempt = ledger.attempt(0, Step.CHECKPOINT)
    with pytest.raises(ValueError, match="not a path inside a store"):
        attempt.path("../../../run.json")
    output = {"path": "../run-2/run.json", "bytes": 1, "sha256": "0" * 64}
    with pytest.raises(ValueError, match="not a path inside a store"):
        ledger.commit(
            iteration=0,
            step=Step.CHECKPOINT,
            shard=None,
            attempt=attempt,
            inputs={},
            config_digest="0" * 64,
            environment=ENVIRONMENT,
            started_at=time.time(),
            outputs=(output,),  # type: ignore[arg-type]
        )


class _ShortPages(LocalStore):
    """Lists three names at a time, as an object store lists a thousand."""

    pages = 0

    def page(self, folder: str, after: str) -> tuple[list[str], bool]:
        self.pages += 1
        names, _ = super().page(folder, after)
        return names[:3], len(names) > 3


@pytest.mark.parametrize("iterations", [1, 3, 4, 7, 10, 31, 100, 200])
def test_the_newest_iteration_of_a_long_run_is_found_in_few_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iterations: int
) -> None:
    monkeypatch.setattr("cairn.storage.ledger.ledger._PAGE", 3)
    store = _ShortPages(str(tmp_path))
    for iteration in range(iterations):
        path = tmp_path / layout.commit("run-1", iteration, Step.TRAIN)
        path.parent.mkdir(parents=True)
        path.touch()
    (tmp_path / layout.attempt("run-1", iterations, Step.ROLLOUT, "000001-0f")).mkdir(parents=True)
    assert Ledger.create(store, "run-1", CONFIG).last_iteration() == iterations - 1
    assert store.pages <= 3 + 2 * math.log2(iterations)


def test_a_driver_finds_the_newest_iteration_where_its_predecessor_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.storage.ledger.ledger._PAGE", 3)
    store = _ShortPages(str(tmp_path))
    ledger = Ledger.create(store, "run-1", CONFIG)
    for iterations in (range(10), range(0), range(10, 20)):  # the second driver commits nothing
        lease = ledger.acquire()
        for iteration in iterations:
            commit_step(ledger, iteration, Step.TRAIN)
        lease.release(Outcome.STOPPED)
    later = Ledger.open(store, "run-1")
    later.acquire()
    store.pages = 0
    assert (later.last_iteration(), store.pages) == (19, 1)
    shutil.rmtree(tmp_path / layout.iteration("run-1", 19))
    later = Ledger.open(store, "run-1")
    later.acquire(takeover=True)
    assert later.last_iteration() == 18, "where nothing is as far as that, all are searched"


def test_a_fork_finds_what_it_shares_where_it_lies_and_adds_its_own(store: Store, ledger: Ledger) -> None:
    for iteration in range(3):
        commit_step(ledger, iteration, Step.TRAIN)
    fork = Ledger.create(store, "fork", CONFIG, {}, Parent(run="run-1", iteration=1))
    assert (fork.first_iteration, fork.last_iteration(), fork.iterations()) == (2, 1, [0, 1])
    assert fork.find(1, Step.TRAIN) == ledger.find(1, Step.TRAIN)
    assert fork.find(2, Step.TRAIN) is None
    fork.acquire()
    own = commit_step(fork, 2, Step.TRAIN)
    restore_point = commit_step(fork, 1, Step.CHECKPOINT)
    assert (own.run, fork.find(2, Step.TRAIN), fork.iterations()) == ("fork", own, [0, 1, 2])
    assert fork.find(1, Step.CHECKPOINT) == restore_point
    assert [commit.step for commit in fork.commits(1)] == [Step.TRAIN, Step.CHECKPOINT]
    assert ledger.find(1, Step.CHECKPOINT) is None
    grandchild = Ledger.create(store, "grandchild", CONFIG, {}, Parent(run="fork", iteration=2))
    assert [grandchild.owner(iteration).run for iteration in range(4)] == ["run-1", "run-1", "fork", "grandchild"]
    assert grandchild.find(1, Step.CHECKPOINT) == restore_point


def test_runs_that_are_forked_from_each_other_are_damage(store: Store) -> None:
    Ledger.create(store, "egg", CONFIG, {}, Parent(run="hen", iteration=1))
    Ledger.create(store, "hen", CONFIG, {}, Parent(run="egg", iteration=1))
    with pytest.raises(Damaged, match="'egg' is recorded as forked from itself, through egg and hen"):
        Ledger.open(store, "egg").find(0, Step.TRAIN)
