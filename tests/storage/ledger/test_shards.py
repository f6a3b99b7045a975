"""Commits of shards share records, and every reader sees them as commits."""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.shards import PACE, Records, read_commits, record_bytes
from cairn.storage.query.catalogue import Catalogue
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged, LeaseLost, StoreError
from cairn.storage.store.store import Store
from cairn.storage.upkeep.collector import garbage
from cairn.storage.upkeep.verification import Fault, verify
from tests.storage.builders import ENVIRONMENT, commit_step, rollout_table

SHARDS = [f"00-{part:03d}" for part in range(40)]
"""Shards of a round."""

pytestmark = pytest.mark.contract


@pytest.fixture
def ledger(store: Store) -> Ledger:
    ledger = Ledger.create(store, "run", {})
    ledger.acquire()
    return ledger


def commit_round(ledger: Ledger, shards: Sequence[str] = tuple(SHARDS)) -> list[Commit]:
    """Commit rollout and reward of shards as their threads do: at about the same time."""

    def run(shard: str) -> list[Commit]:
        with ledger.running(0):
            rollout = commit_step(ledger, 0, Step.ROLLOUT, shard, table=rollout_table([1]), shared=True)
        with ledger.running(0):
            return [rollout, commit_step(ledger, 0, Step.REWARD, shard, inputs=(rollout,), shared=True)]

    with ThreadPoolExecutor(len(shards)) as pool:
        return [commit for pair in pool.map(run, shards) for commit in pair]


def records_of(ledger: Ledger) -> list[str]:
    return [path for path in ledger.markers(0) if layout.parse_record(path.rpartition("/")[2]) is not None]


def test_shards_that_end_together_share_records_and_are_found_as_ever(ledger: Ledger, store: Store) -> None:
    made = commit_round(ledger)
    train = commit_step(ledger, 0, Step.TRAIN, inputs=tuple(made))
    assert len(records_of(ledger)) <= len(made) / 2
    for reader in (ledger, Ledger.open(store, "run")):
        assert {one.name: one.digest for one in reader.commits(0)} == {one.name: one.digest for one in [*made, train]}
        for commit in made:
            assert reader.find(0, commit.step, commit.shard) == commit
        assert reader.find(0, Step.ROLLOUT, "01-000") is None
    checks = list(verify(Ledger.open(store, "run")))
    assert not [finding for check in checks for finding in check.findings if finding.fault is not Fault.GROUP_LOST]
    assert {check.name for check in checks} >= {one.name for one in made}
    assert not list(garbage(Ledger.open(store, "run")))


def test_a_shard_that_runs_alone_does_not_wait(ledger: Ledger) -> None:
    commit_round(ledger, SHARDS[:1])
    began = time.monotonic()
    with ledger.running(0):
        recorder = ledger._records.of("run", 0).recorder
        assert recorder._delay() <= PACE
        commit_step(ledger, 0, Step.ROLLOUT, "01-000", shared=True)
    assert time.monotonic() - began < 5  # far less, but for the machine's other load
    assert ledger.find(0, Step.ROLLOUT, "01-000") is not None


def new_commit(shard: str) -> Commit:
    """A commit of a shard that no other driver makes."""
    attempt = layout.attempt_name(shard, 1, uuid.uuid4().hex[:12])
    place: dict[str, Any] = {"run": "run", "iteration": 0, "step": Step.ROLLOUT, "shard": shard, "attempt": attempt}
    return Commit(**place, epoch=1, config_digest="0" * 64, started_at=1.0, committed_at=2.0, environment=ENVIRONMENT)


def test_of_two_drivers_that_record_the_same_shards_each_shard_has_one_commit(store: Store) -> None:
    ledger = Ledger.create(store, "run", {})
    start = threading.Barrier(2)

    def drive(records: Records) -> dict[str, str]:
        start.wait()
        found: dict[str, str] = {}
        for first in range(0, 12, 3):
            own = [new_commit(shard) for shard in SHARDS[first : first + 4]]
            found |= {one.name: one.digest for one in records.create(own, lambda: None)}
        return found

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(drive, [Records(store, "run", 0) for _ in range(2)])
    assert one == other
    held = [commit for path in records_of(ledger) for commit in read_commits(store.read(path), path)]
    assert {(commit.name, commit.digest) for commit in held} == one.items()
    assert len(one) == 13


def test_a_reader_needs_few_of_many_records_and_finds_every_commit(
    ledger: Ledger, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [commit_step(ledger, 0, Step.ROLLOUT, f"00-{part:03d}", shared=True) for part in range(4 * 4 * 2 + 4 + 3)]
    assert len(records_of(ledger)) == len(made)
    monkeypatch.setattr("cairn.storage.ledger.shards._FULL", 1)
    made += [commit_step(ledger, 0, Step.REWARD, f"00-{part:03d}", shared=True) for part in range(5 + 2)]
    read: list[str] = []
    call = store.read_many
    monkeypatch.setattr(store, "read_many", lambda paths: (read.extend(paths), call(paths))[1])
    reader = Ledger.open(store, "run")
    reader.acquire(takeover=True)
    found = [reader.find(0, one.step, one.shard) for one in made]
    assert [one and one.digest for one in found] == [one.digest for one in made]
    # Twice 16 and 4 in a record each; 3 and 7, which repeat none because they are full.
    assert len(read) == len(set(read)) == 2 + 1 + 3 + 7
    assert [one.digest for one in reader.commits(0)] == [one.digest for one in made]
    assert [one.path for one in made] == records_of(ledger)
    names = Catalogue(store, "run").commits([Step.ROLLOUT, Step.REWARD]).column("name").to_pylist()
    assert sorted(names) == sorted(one.name for one in made)
    assert {check.name for check in verify(reader)} >= set(names)


def test_a_record_that_repeats_a_commit_differently_is_a_finding(ledger: Ledger, store: Store) -> None:
    made = [commit_step(ledger, 0, Step.ROLLOUT, shard, shared=True) for shard in SHARDS[:4]]
    path = made[-1].path
    assert [one.path for one in read_commits(store.read(path), path)] == [one.path for one in made]
    assert not [finding for check in verify(ledger) for finding in check.findings if finding.path == path]
    forged = made[0].model_copy(update={"started_at": 2.0})
    store.write(path, record_bytes(made[3:], [forged, *made[1:3]]))
    findings = [finding for check in verify(Ledger.open(store, "run")) for finding in check.findings]
    assert (Fault.UNREADABLE, path) in {(finding.fault, finding.path) for finding in findings}


def test_a_lost_record_is_a_finding_and_its_commits_are_found_where_a_later_one_repeats_them(
    ledger: Ledger, store: Store
) -> None:
    made = [commit_step(ledger, 0, Step.ROLLOUT, shard, shared=True) for shard in SHARDS[:16]]
    store.delete(made[1].path)
    assert Ledger.open(store, "run").commits(0) == made
    checks = list(verify(Ledger.open(store, "run")))
    assert [check.name for check in checks if check.is_commit].count(made[1].name) == 1
    findings = [finding for check in checks for finding in check.findings]
    assert [finding.path for finding in findings if finding.fault is Fault.MISSING] == [made[1].path]


@pytest.mark.parametrize("records", [[0, 1], [0, 1, 2, 3], [0, 1, True], [0, 1, 2.0], [0, 1, [2]], [-1, 1, 2]])
def test_a_record_that_does_not_repeat_all_that_its_number_says_is_damage(
    ledger: Ledger, store: Store, records: list[Any]
) -> None:
    made = [commit_step(ledger, 0, Step.ROLLOUT, shard, shared=True) for shard in SHARDS[:4]]
    path = made[-1].path
    fields = canonical.unseal(store.read(path))
    repeated = [{**fields["repeated"][0], "record": number} for number in records]
    with pytest.raises(Damaged, match="does not repeat all records from number 0 on"):
        read_commits(canonical.seal({**fields, "repeated": repeated}), path)


def test_versions_that_read_every_record_find_each_commit_once(ledger: Ledger, store: Store) -> None:
    made = [commit_step(ledger, 0, Step.ROLLOUT, shard, shared=True) for shard in SHARDS[:16]]
    listed = [canonical.unseal(store.read(path))["commits"] for path in records_of(ledger)]
    assert [one["digest"] for own in listed for one in own] == [one.digest for one in made]


def test_a_driver_that_was_taken_over_records_nothing(ledger: Ledger, store: Store) -> None:
    commit_round(ledger, SHARDS[:2])
    taken = Ledger.open(store, "run")
    taken.acquire(takeover=True)
    before = records_of(taken)
    with pytest.raises(LeaseLost):
        commit_round(ledger, SHARDS[2:5])
    assert records_of(taken) == before
    assert len(commit_round(taken, SHARDS[2:5])) == 6


def test_commits_of_an_earlier_version_and_records_are_one_history(ledger: Ledger, store: Store) -> None:
    old = [commit_step(ledger, 0, Step.ROLLOUT, shard) for shard in SHARDS[:2]]
    later = Ledger.open(store, "run")
    later.acquire(takeover=True)
    assert [later.find(0, Step.ROLLOUT, shard) for shard in SHARDS[:3]] == [*old, None]
    new = commit_round(later, SHARDS[2:4])
    rewards = [commit_step(later, 0, Step.REWARD, one.shard, inputs=(one,), shared=True) for one in old]
    expected = sorted(commit.name for commit in [*old, *new, *rewards])
    assert sorted(commit.name for commit in Ledger.open(store, "run").commits(0)) == expected


def test_a_record_whose_response_is_lost_is_found_by_the_next_try(
    ledger: Ledger, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = store.create

    def lose_the_response(path: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
        create(path, data, guard)
        raise StoreError("no response")

    assert ledger.find(0, Step.ROLLOUT, SHARDS[0]) is None
    monkeypatch.setattr(store, "create", lose_the_response)
    with pytest.raises(StoreError):
        commit_step(ledger, 0, Step.ROLLOUT, SHARDS[0], shared=True)
    monkeypatch.undo()
    found = ledger.find(0, Step.ROLLOUT, SHARDS[0])
    assert found is not None
    assert commit_step(ledger, 0, Step.ROLLOUT, SHARDS[0], shared=True) == found
    assert len(records_of(ledger)) == 1


def test_the_owner_asks_once_which_shards_of_a_new_iteration_are_committed(
    ledger: Ledger, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name in ("read", "list", "exists"):
        call = getattr(store, name)
        monkeypatch.setattr(store, name, lambda path, call=call: (asked.append(path), call(path))[1])
    assert [ledger.find(0, step, shard) for step in (Step.ROLLOUT, Step.REWARD) for shard in SHARDS] == 80 * [None]
    assert len(asked) == 2


@pytest.mark.parametrize("change", [(b'"00-000"', b'"00-001"'), (b'"epoch": 1', b'"epoch": 2'), (b"}", b" }")])
def test_any_changed_byte_of_a_record_is_damage_that_names_it(
    ledger: Ledger, store: Store, change: tuple[bytes, bytes]
) -> None:
    commit_round(ledger, SHARDS[:1])
    (path, *_) = records_of(ledger)
    store.write(path, store.read(path).replace(*change, 1))
    with pytest.raises(Damaged, match=path):
        Ledger.open(store, "run").find(0, Step.ROLLOUT, SHARDS[0])
    findings = [finding for check in verify(Ledger.open(store, "run")) for finding in check.findings]
    assert (Fault.UNREADABLE, path) in {(finding.fault, finding.path) for finding in findings}


def test_a_forged_number_of_a_record_is_damage_at_once(ledger: Ledger, store: Store) -> None:
    commit_round(ledger, SHARDS[:1])
    forged = layout.record("run", 0, layout.LAST_NUMBER)
    store.write(forged, record_bytes([new_commit(SHARDS[1])]))
    gap = layout.record("run", 0, layout.LAST_NUMBER // 64 * 64 - 1)
    began = time.monotonic()
    with pytest.raises(Damaged, match=f"{gap} is missing"):
        Ledger.open(store, "run").commits(0)
    taken = Ledger.open(store, "run")
    taken.acquire(takeover=True)
    with pytest.raises(Damaged, match=f"{gap} is missing"):
        taken.find(0, Step.ROLLOUT, SHARDS[0])
    assert time.monotonic() - began < 30, "a million records are looked for"


def test_records_of_long_commits_are_split(store: Store) -> None:
    Ledger.create(store, "run", {})
    inputs = {f"000000/rollout.{number:05d}": "0" * 64 for number in range(10_000)}
    made = [new_commit(shard).model_copy(update={"inputs": inputs}) for shard in SHARDS[:12]]
    recorded = Records(store, "run", 0).create(made, lambda: None)
    assert [one.digest for one in recorded] == [one.digest for one in made]
    sizes = [len(store.read(path)) for path in sorted({one.path for one in recorded})]
    assert len(sizes) > 1
    assert max(sizes) < 5 * 2**20
