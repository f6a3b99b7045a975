"""Every prompt that a stream admitted is taken once or open, and what is not so is found."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.redacted import Fault
from cairn.storage.logs.admissions import Claim, claim_admission
from cairn.storage.opening import open_store
from cairn.storage.upkeep.verification import verify
from tests.storage.builders import CONFIG, commit_step, rollout_table


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    streaming = {**CONFIG, "rollout": {"pipeline": "streaming", "max_age": 2}}
    ledger = Ledger.create(open_store(str(tmp_path)), "run-1", streaming)
    ledger.acquire()
    return ledger


def admitted(ledger: Ledger, index: int, groups: Sequence[int], number: int) -> Commit:
    return commit_step(ledger, index, Step.ADMIT, "00", values={"groups": list(groups), "number": number})


def taken(
    ledger: Ledger, index: int, groups: Sequence[int], newest: Commit, left: Mapping[str, Sequence[int]]
) -> Commit:
    values = {"groups": list(groups), "admitted": newest.name, "open": {name: list(ids) for name, ids in left.items()}}
    table = rollout_table(list(groups))
    return commit_step(ledger, index, Step.ROLLOUT, "00-000", inputs=(newest,), table=table, values=values)


def test_what_an_iteration_takes_of_a_later_ones_is_open_until_then(ledger: Ledger) -> None:
    first, second = admitted(ledger, 0, [0, 1], 0), admitted(ledger, 1, [2, 3], 1)
    admitted(ledger, 2, [4, 5], 2)
    taken(ledger, 0, [2, 0], second, {first.name: [1], second.name: [3]})
    *others, last = verify(ledger)
    assert not [finding.message for one in [*others, last] for finding in one.findings]
    assert last.groups is not None
    assert last.groups.open == 2 + 4, "those of an iteration without a batch, and those of the stream"


@pytest.mark.parametrize(
    ("takes", "left", "fault", "message"),
    [
        ([[0], [0]], [1, 2, 3], Fault.GROUP_DIFFERS, "group 0 is taken by 000001/rollout.00-000 and 000000/rollout"),
        (
            [[0], [1]],
            [3],
            Fault.GROUP_LOST,
            "group 2 is admitted by 000001/admit.00, but 000001/rollout.00-000 neither",
        ),
        (
            [[0], [9]],
            [1, 2, 3],
            Fault.GROUP_DIFFERS,
            "group 9 is taken by 000001/rollout.00-000, but was never admitted",
        ),
    ],
)
def test_a_group_that_is_taken_twice_lost_or_never_admitted_is_found(
    takes: Sequence[Sequence[int]], left: Sequence[int], fault: Fault, message: str, ledger: Ledger
) -> None:
    admitted(ledger, 0, [0, 1], 0)
    second = admitted(ledger, 1, [2, 3], 1)
    for index, groups in enumerate(takes):
        taken(ledger, index, groups, second, {second.name: left})
    (finding,) = [finding for one in verify(ledger) for finding in one.findings]
    assert finding.fault == fault
    assert finding.message.startswith(message)


def claimed(ledger: Ledger, number: int, index: int, count: int = 2) -> Claim:
    return claim_admission(ledger, number, iteration=index, shard="00", count=count, without=())


@pytest.mark.parametrize(
    ("count", "number", "message"),
    [
        (2, 0, None),
        (2, 2, None),  # it was about to be made
        (3, 0, "admission 0 is claimed for 000000/admit.00 with 3 groups, but is 000000/admit.00 with 2"),
        (2, 1, "admission 1 is claimed for 000000/admit.00 with 2 groups, but is 000001/admit.00 with 2"),
    ],
)
def test_an_admission_that_is_not_what_was_claimed_is_found(
    count: int, number: int, message: str | None, ledger: Ledger
) -> None:
    claimed(ledger, number, 0, count)
    for index in range(2):
        admitted(ledger, index, [2 * index, 2 * index + 1], index)
    checks = list(verify(ledger))
    assert [one.name for one in checks if "admissions" in one.name] == [f"stream/admissions/00000{number}.json"]
    assert [(f.fault, f.message) for one in checks for f in one.findings] == (
        [(Fault.ADMISSION_DIFFERS, message)] if message else []
    )


def test_a_claim_without_its_admission_is_found_where_there_are_later_ones(ledger: Ledger) -> None:
    claimed(ledger, 0, 0)
    admitted(ledger, 1, [2, 3], 1)
    (finding,) = [finding for one in verify(ledger) for finding in one.findings]
    assert finding.message == ("admission 0 is claimed for 000000/admit.00, but is missing, although later ones exist")


def test_a_claim_that_was_altered_is_found(ledger: Ledger) -> None:
    claimed(ledger, 0, 0)
    path = layout.admission(ledger.run, 0)
    ledger.store.write(path, ledger.store.read(path).replace(b'"count": 2', b'"count": 3'))
    (finding,) = [finding for one in verify(ledger) for finding in one.findings]
    assert finding.message.startswith(f"{path} cannot be trusted: it records the digest")
