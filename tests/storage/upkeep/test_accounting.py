"""What became of every group is told from the tables of a run, and a group that was trained on twice or lost is found.

Groups are spelled as they stand in a cut: `{3: "train"}`, or `{3: ("buffer", 1, "00-000")}` with samples of a rollout
of another iteration.
"""

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pytest

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Parent
from cairn.storage.ledger.redacted import Fault, Finding
from cairn.storage.ledger.schemas import FILTER
from cairn.storage.opening import open_store
from cairn.storage.store.local import LocalStore
from cairn.storage.upkeep.accounting import GroupCounts
from cairn.storage.upkeep.verification import verify
from tests.storage.builders import CONFIG, commit_step, rollout_table

Rows = Mapping[int, str | tuple[str, int, str]]


@pytest.fixture
def ledger(tmp_path: object) -> Ledger:
    ledger = Ledger.create(open_store(str(tmp_path)), "run-1", CONFIG)
    ledger.acquire()
    return ledger


def write(
    ledger: Ledger,
    index: int,
    shards: Mapping[str, Sequence[int]],
    *rounds: Rows | Sequence[Rows],
    after: Commit | None = None,
) -> Commit:
    """Rollouts of an iteration, and a filter step for each round, the last of them full, made from the cut `after`.
    Several mappings of a round stand one after the other in its table."""
    made = [
        commit_step(ledger, index, Step.ROLLOUT, shard, table=rollout_table(list(groups)))
        for shard, groups in shards.items()
    ]
    for number, round in enumerate(rounds):
        rows = [
            {
                "group_id": group,
                "iteration": place[1],
                "shard": place[2],
                "kept": place[0] != "drop",
                "disposition": place[0],
                "reason": "zero_std" if place[0] == "drop" else None,
            }
            for part in ([round] if isinstance(round, Mapping) else round)
            for group, outcome in part.items()
            for place in [outcome if isinstance(outcome, tuple) else (outcome, index, _holding(shards, group))]
        ]
        made.append(
            commit_step(
                ledger,
                index,
                Step.FILTER,
                f"{number:02d}",
                inputs=(*([] if after is None else [after]), *made),
                table=pa.Table.from_pylist(rows, FILTER),
                values={"full": number == len(rounds) - 1},
            )
        )
    return made[-1]


def _holding(shards: Mapping[str, Sequence[int]], group: int) -> str:
    return next((shard for shard in reversed(shards) if group in shards[shard]), "00-000")


def accounted(ledger: Ledger) -> tuple[GroupCounts, list[Finding]]:
    *others, last = verify(ledger)
    assert not [finding for one in others for finding in one.findings]
    assert last.groups is not None
    return last.groups, list(last.findings)


def sound(ledger: Ledger) -> GroupCounts:
    groups, findings = accounted(ledger)
    assert [finding.message for finding in findings] == []
    return groups


def only_finding(ledger: Ledger) -> Finding:
    _, (finding,) = accounted(ledger)
    return finding


def test_every_group_is_trained_on_dropped_or_open(ledger: Ledger) -> None:
    first = write(ledger, 0, {"00-000": [0, 1], "00-001": [2, 3]}, {0: "train", 1: "drop", 2: "buffer", 3: "continue"})
    second = write(
        ledger,
        1,
        {"00-000": [3, 4], "00-001": [5]},
        {2: ("train", 0, "00-001"), 3: "train", 4: "buffer", 5: "drop"},
        after=first,
    )
    commit_step(ledger, 2, Step.ROLLOUT, "00-000", inputs=(second,), table=rollout_table([6, 7]))
    assert sound(ledger) == GroupCounts(trained=3, dropped={"zero_std": 2}, open=3, retired=(), unreadable=())


def test_a_group_may_be_left_unfinished_again_and_again_and_be_continued_in_another_round(ledger: Ledger) -> None:
    shards = {"00-000": [0, 1], "01-000": [1, 2]}
    first = write(ledger, 0, shards, {0: "train", 1: ("continue", 0, "00-000")}, {0: "train", 1: "continue", 2: "drop"})
    waits = ("continue", 0, "01-000")
    second = write(ledger, 1, {"00-000": [3]}, {1: waits, 3: "train"}, after=first)
    third = write(ledger, 2, {"00-000": [4]}, {1: waits, 4: "train"}, after=second)
    write(ledger, 3, {"00-000": [1, 5], "100-000": [1]}, {1: ("train", 3, "100-000"), 5: "train"}, after=third)
    assert sound(ledger) == GroupCounts(trained=5, dropped={"zero_std": 1}, open=0, retired=(), unreadable=())


def test_rounds_before_the_last_say_nothing_for_good(ledger: Ledger) -> None:
    write(ledger, 0, {"00-000": [0, 1], "01-000": [2]}, {0: "train", 1: "drop"}, {0: "train", 1: "train", 2: "drop"})
    assert sound(ledger).trained == 2


def test_a_batch_that_no_round_has_filled_leaves_its_groups_open(ledger: Ledger) -> None:
    first = write(ledger, 0, {"00-000": [0, 1]}, {0: "train", 1: "buffer"})
    rollout = commit_step(ledger, 1, Step.ROLLOUT, "00-000", table=rollout_table([2]))
    table = pa.Table.from_pylist([{"group_id": 2, "disposition": "drop"}])
    commit_step(ledger, 1, Step.FILTER, "00", inputs=(first, rollout), table=table, values={"full": False})
    assert sound(ledger) == GroupCounts(trained=1, dropped={}, open=2, retired=(), unreadable=())


def test_a_group_in_the_batches_of_two_iterations_is_found(ledger: Ledger) -> None:
    first = write(ledger, 0, {"00-000": [0, 1]}, {0: "train", 1: "buffer"})
    cut = write(
        ledger, 1, {"00-000": [2]}, {0: ("train", 0, "00-000"), 1: ("train", 0, "00-000"), 2: "drop"}, after=first
    )
    finding = only_finding(ledger)
    assert (finding.fault, finding.path) == (Fault.TRAINED_TWICE, layout.commit("run-1", 1, cut.step, cut.shard))
    assert finding.message == "group 0 is trained on in 000001/filter.00, although trained on in 000000/filter.00"


def test_a_group_that_stands_twice_in_one_batch_is_found(ledger: Ledger) -> None:
    write(ledger, 0, {"00-000": [0, 1]}, [{0: "train", 1: "train"}, {0: "train"}])
    finding = only_finding(ledger)
    assert (finding.fault, finding.message) == (Fault.TRAINED_TWICE, "group 0 is trained on twice in 000000/filter.00")


def test_a_generated_group_of_which_the_batch_says_nothing_is_found(ledger: Ledger) -> None:
    write(ledger, 0, {"00-000": [0, 1], "00-001": [2]}, {0: "train", 1: "train"})
    finding = only_finding(ledger)
    assert finding.fault is Fault.GROUP_LOST
    assert (
        finding.message
        == "group 2 was generated in 000000/rollout.00-001 and is not among the groups of 000000/filter.00"
    )


@pytest.mark.parametrize(("left", "verb"), [("buffer", "buffered"), ("continue", "left unfinished")])
def test_a_group_that_was_left_open_and_is_forgotten_is_found(ledger: Ledger, left: str, verb: str) -> None:
    first = write(ledger, 0, {"00-000": [0, 1]}, {0: "train", 1: left})
    write(ledger, 1, {"00-000": [2]}, {2: "train"}, after=first)
    finding = only_finding(ledger)
    assert finding.fault is Fault.GROUP_LOST
    assert finding.message == f"group 1 was {verb} by 000000/filter.00 and is not among the groups of 000001/filter.00"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            {1: ("buffer", 0, "00-000"), 2: "train"},
            "group 1 is buffered in 000001/filter.00, although dropped in 000000/filter.00",
        ),
        (
            {2: "train", 9: "train"},
            "group 9 is trained on in 000001/filter.00, but neither the cut before nor a rollout has it",
        ),
        (
            {2: ("train", 0, "00-000")},
            "group 2 is trained on in 000001/filter.00 with samples of 000000/rollout.00-000, its newest are in "
            "000001/rollout.00-000",
        ),
    ],
)
def test_a_batch_that_contradicts_the_commits_before_it_is_found(ledger: Ledger, rows: Rows, message: str) -> None:
    first = write(ledger, 0, {"00-000": [0, 1]}, {0: "train", 1: "drop"})
    write(ledger, 1, {"00-000": [2]}, rows, after=first)
    finding = only_finding(ledger)
    assert (finding.fault, finding.message) == (Fault.GROUP_DIFFERS, message)


def test_a_fork_goes_on_with_what_it_shares_and_its_parent_with_its_own(ledger: Ledger) -> None:
    first = write(ledger, 0, {"00-000": [0, 1]}, {0: "train", 1: "buffer"})
    write(ledger, 1, {"00-000": [2]}, {1: ("train", 0, "00-000"), 2: "train"}, after=first)
    fork = Ledger.create(ledger.store, "fork", CONFIG, parent=Parent(run="run-1", iteration=0))
    fork.acquire()
    write(fork, 1, {"00-000": [2]}, {1: ("drop", 0, "00-000"), 2: "train"}, after=first)
    assert sound(ledger) == GroupCounts(trained=3, dropped={}, open=0, retired=(), unreadable=())
    assert sound(fork) == GroupCounts(trained=2, dropped={"zero_std": 1}, open=0, retired=(), unreadable=())


def test_what_was_open_stays_so_where_a_cut_is_not_made_from_the_one_before(ledger: Ledger) -> None:
    """A fork whose data hold the responses."""
    write(ledger, 0, {"00-000": [0, 1]}, {0: "train", 1: "buffer"})
    second = write(ledger, 1, {"00-000": [2]}, {2: "train"})
    write(ledger, 2, {"00-000": [3]}, {3: "train"}, after=second)
    assert sound(ledger) == GroupCounts(trained=3, dropped={}, open=1, retired=(), unreadable=())


def _without_tables(ledger: Ledger, index: int) -> None:
    for commit in ledger.commits(index):
        for output in commit.outputs:
            ledger.store.delete(layout.in_run(ledger.run, output.path))


def test_iterations_without_tables_are_named_and_what_follows_is_accounted_for(ledger: Ledger) -> None:
    before = write(ledger, 0, {"00-000": [0, 1]}, {0: "train", 1: "buffer"})
    before = write(ledger, 1, {"00-000": [2, 3]}, {1: ("train", 0, "00-000"), 2: "buffer", 3: "drop"}, after=before)
    before = write(ledger, 2, {"00-000": [4]}, {2: ("train", 1, "00-000"), 4: "buffer"}, after=before)
    write(ledger, 3, {"00-000": [5]}, {0: ("train", 0, "00-000"), 5: "train"}, after=before)
    _without_tables(ledger, 1)
    ledger.store.create(layout.retired(ledger.run, 1, layout.Kind.SNAPSHOTS), b"{}")
    groups, findings = accounted(ledger)
    assert (groups.trained, groups.retired, groups.unreadable) == (3, (1,), ())
    assert [(finding.fault, finding.message.partition(",")[0]) for finding in findings] == [
        (Fault.TRAINED_TWICE, "group 0 is trained on in 000003/filter.00"),
        (Fault.GROUP_LOST, "group 4 was buffered by 000002/filter.00 and is not among the groups of 000003/filter.00"),
    ]


def test_damaged_tables_are_damage_and_no_lost_groups(ledger: Ledger) -> None:
    before = write(ledger, 0, {"00-000": [0, 1]}, {0: "train", 1: "buffer"})
    write(ledger, 1, {"00-000": [2]}, {1: ("train", 0, "00-000"), 2: "train"}, after=before)
    _without_tables(ledger, 0)
    *others, last = verify(ledger)
    assert {finding.fault for one in others for finding in one.findings} == {Fault.MISSING}
    assert last.findings == ()
    assert last.groups == GroupCounts(trained=2, dropped={}, open=0, retired=(), unreadable=(0,))


def test_of_a_large_table_only_the_columns_that_tell_are_read(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    table = rollout_table(list(range(8)), samples=16, tokens=20_000)
    rollout = commit_step(ledger, 0, Step.ROLLOUT, "00-000", table=table)
    (output,) = rollout.outputs
    assert output.bytes > 10 * 2**20
    read: list[int] = []
    read_range = LocalStore.read_range

    def counted(store: LocalStore, path: str, start: int, end: int) -> bytes:
        read.append(end - start)
        return read_range(store, path, start, end)

    monkeypatch.setattr(LocalStore, "read_range", counted)
    monkeypatch.setattr(LocalStore, "read", _not_whole(LocalStore.read, layout.in_run("run-1", output.path)))
    assert sound(ledger).open == 8
    assert 0 < sum(read) < 4 * 2**20


def _not_whole(read: object, path: str) -> object:
    def refused(store: LocalStore, requested: str) -> bytes:
        assert requested != path
        return read(store, requested)  # type: ignore[operator, no-any-return]

    return refused
