"""Every prompt that a stream admitted is taken once or open, and what is not so is found."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from cairn.storage.commits import Commit, Step
from cairn.storage.findings import Fault
from cairn.storage.ledger import Ledger
from cairn.storage.store import open_store
from cairn.storage.verification import verify
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
    ("takes", "left", "fault", "told"),
    [
        ([[0], [0]], [1, 2, 3], Fault.GROUP_DIFFERS, "group 0 is taken by 000001/rollout.00-000 and 000000/rollout"),
        (
            [[0], [1]],
            [3],
            Fault.GROUP_LOST,
            "group 2 is admitted by 000001/admit.00, and 000001/rollout.00-000 neither",
        ),
        ([[0], [9]], [1, 2, 3], Fault.GROUP_DIFFERS, "group 9 is taken by 000001/rollout.00-000, and never admitted"),
    ],
)
def test_a_group_that_is_taken_twice_lost_or_never_admitted_is_found(
    takes: Sequence[Sequence[int]], left: Sequence[int], fault: Fault, told: str, ledger: Ledger
) -> None:
    admitted(ledger, 0, [0, 1], 0)
    second = admitted(ledger, 1, [2, 3], 1)
    for index, groups in enumerate(takes):
        taken(ledger, index, groups, second, {second.name: left})
    (finding,) = [finding for one in verify(ledger) for finding in one.findings]
    assert finding.fault == fault
    assert finding.message.startswith(told)
