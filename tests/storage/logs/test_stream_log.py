"""What a stream keeps of samples that no step has taken: one row a sample, until a commit has its group."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from cairn.storage.ledger import layout
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import ROLLOUT
from cairn.storage.ledger.snapshots import AttemptFolder
from cairn.storage.logs.admissions import open_groups
from cairn.storage.logs.sample_log import SampleLog, prompts_in_stream
from cairn.storage.opening import open_store
from cairn.storage.store.store import Store
from cairn.storage.upkeep.collector import Reason, collect, garbage
from cairn.storage.upkeep.verification import verify
from tests.storage.builders import CONFIG
from tests.storage.logs.test_admitted import admitted, taken


def blank(field: pa.Field) -> Any:
    """A value that says nothing."""
    if field.nullable:
        return None
    return [] if pa.types.is_list(field.type) else "" if pa.types.is_string(field.type) else 0


def rows(*samples: tuple[int, int, str, list[int]]) -> pa.Table:
    """Of (group, sample, status, tokens)."""
    values = {"group_id": 0, "sample_index": 1, "status": 2, "response_ids": 3, "prompt_index": 0}
    columns = {
        field.name: [sample[values[field.name]] if field.name in values else blank(field) for sample in samples]
        for field in ROLLOUT
    }
    return pa.table({name: pa.array(column, ROLLOUT.field(name).type) for name, column in columns.items()}, ROLLOUT)


def log(store: Store, number: int, groups: Collection[int] = (), inputs: str = "same") -> SampleLog:
    folder = AttemptFolder(store, layout.stream("run"), f"{number:06d}-ab", root=layout.run("run"))
    return SampleLog(folder, inputs, groups=groups)


def parts(folder: Path) -> Sequence[Path]:
    return sorted((folder / "runs/run/stream").rglob("*.arrow"))


def test_a_sample_goes_on_from_its_newest_row_or_has_ended_with_the_first_that_says_so(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with log(store, 1) as first:
        first.append(rows((7, 0, "aborted", [1]), (7, 1, "completed", [5]), (8, 0, "aborted", [9])))
    with log(store, 2) as second:
        second.append(rows((7, 0, "aborted", [1, 2]), (7, 1, "completed", [6]), (9, 0, "completed", [3])))
    assert prompts_in_stream(store, "run") == {7, 8, 9}
    with log(store, 3, {7, 8}) as third:
        found = third.recover().select(["group_id", "sample_index", "response_ids"]).to_pylist()
    assert sorted(tuple(row.values()) for row in found) == [(7, 0, [1, 2]), (7, 1, [5]), (8, 0, [9])]


def test_what_a_driver_that_was_taken_over_still_writes_never_counts(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with log(store, 1) as first:
        first.append(rows((7, 0, "aborted", [1]), (7, 1, "completed", [5])))
        while len(parts(tmp_path)) < 1:
            pass
        with log(store, 2, {7}) as second:
            assert second.recover().num_rows == 2
            first.append(rows((7, 0, "completed", [1, 2]), (7, 2, "completed", [6])))
    with log(store, 3, {7}) as third:
        found = third.recover().select(["sample_index", "response_ids"]).to_pylist()
        assert sorted(tuple(row.values()) for row in found) == [(0, [1]), (1, [5])]
    with log(store, 4, {7}) as fourth:
        assert fourth.recover().num_rows == 2
        fourth.forget([7])
    assert not parts(tmp_path)


def test_what_was_made_from_other_inputs_or_is_torn_is_nobodys_and_goes(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with log(store, 1, inputs="others") as first:
        first.append(rows((7, 0, "completed", [1])))
    with log(store, 2) as second:
        second.append(rows((7, 1, "completed", [1])))
    (torn,) = [part for part in parts(tmp_path) if "000002-ab" in str(part)]
    torn.write_bytes(torn.read_bytes()[:-1])
    with log(store, 3, {7}) as third:
        assert third.recover().num_rows == 0
        third.forget([7])
    assert not parts(tmp_path)


def test_a_part_goes_when_commits_have_all_of_its_groups_written_before_or_after(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with log(store, 1) as first:
        first.append(rows((1, 0, "completed", [1]), (2, 0, "aborted", [1])))
    with log(store, 2, {1, 2}) as second:
        second.recover()
        second.append(rows((1, 1, "completed", [4])))
        second.forget([1])
    assert [part.parts[-3] for part in parts(tmp_path)] == ["000001-ab", "000002-ab"], "which says what it found there"
    with log(store, 3, {2}) as third:
        third.recover()
        third.forget([2])
    assert not parts(tmp_path)
    assert not list((tmp_path / "runs/run/stream").glob("*"))


def test_what_commits_have_of_a_dead_driver_is_garbage_and_what_is_open_or_a_live_drivers_is_not(
    tmp_path: Path,
) -> None:
    store = open_store(str(tmp_path))
    ledger = Ledger.create(store, "run", {**CONFIG, "rollout": {"pipeline": "streaming", "max_age": 2}})
    ledger.acquire()
    first = admitted(ledger, 0, [1, 2], 0)
    second = admitted(ledger, 1, [3], 1)
    taken(ledger, 0, [1], first, {first.name: [2]})
    with log(store, 1) as own:
        own.append(rows((1, 1, "completed", [1])))
    (live,) = parts(tmp_path)
    for number, groups in enumerate([(1,), (1, 2), (3,)]):
        with log(store, 2 + number) as dead:
            dead.append(rows(*((group, 0, "completed", [1]) for group in groups)))
    assert open_groups(ledger) == {2, *second.values["groups"]}
    (found,) = garbage(ledger)
    assert "/stream/000002-ab/" in found.path
    assert found.reason is Reason.TAKEN
    collect(ledger, [found])
    assert live in parts(tmp_path)
    assert len(parts(tmp_path)) == 3
    assert not [finding for one in verify(ledger) for finding in one.findings]
