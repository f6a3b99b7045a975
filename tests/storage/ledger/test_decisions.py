"""Decisions of people: one history, whoever writes it, and nothing of it can be changed or taken out."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cairn.storage.ledger import layout
from cairn.storage.ledger.decisions import Decision, Gate, GateState, Verdict, gates
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.redacted import Fault
from cairn.storage.opening import open_store
from cairn.storage.store import canonical
from cairn.storage.store.errors import BeingDeleted, Damaged
from cairn.storage.upkeep.verification import verify
from tests.flows.written_runs import new_run


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return new_run(str(tmp_path))


def reopened(ledger: Ledger) -> Ledger:
    return Ledger.open(open_store(ledger.store.url), ledger.run)


def test_every_reader_finds_the_decisions_in_their_order_with_who_when_and_why(ledger: Ledger) -> None:
    first = ledger.decisions.record(lambda so_far: Gate(iteration=2, cause="before"), by="driver", why="due")
    second = ledger.decisions.record(lambda so_far: Verdict(iteration=2, approved=True), by="ada")
    found = reopened(ledger).decisions.all()
    assert found == (first, second)
    assert [(one.number, one.by, one.why) for one in found] == [(1, "driver", "due"), (2, "ada", None)]
    assert second.previous == first.digest
    assert first.at <= second.at


def test_of_people_who_decide_at_once_each_sees_all_that_came_before(ledger: Ledger) -> None:
    seen: dict[int, int] = {}

    def vote(iteration: int) -> Decision:
        def decide(so_far: tuple[Decision, ...]) -> Verdict:
            seen[iteration] = len(so_far)
            return Verdict(iteration=iteration, approved=True)

        return reopened(ledger).decisions.record(decide)

    with ThreadPoolExecutor(8) as people:
        made = list(people.map(vote, range(8)))
    assert sorted(one.number for one in made) == list(range(1, 9))
    assert all(seen[one.what.iteration] == one.number - 1 for one in made if isinstance(one.what, Verdict))
    assert len(reopened(ledger).decisions.all()) == 8


def test_the_newest_verdict_on_a_gate_counts(ledger: Ledger) -> None:
    ledger.decisions.record(lambda so_far: Gate(iteration=1, cause="every"))
    assert ledger.decisions.gates()[1].state is GateState.OPEN
    for approved, state in ((False, GateState.REJECTED), (True, GateState.APPROVED)):
        ledger.decisions.record(lambda so_far, approved=approved: Verdict(iteration=1, approved=approved))
        assert gates(reopened(ledger).decisions.all())[1].state is state


@pytest.mark.parametrize(
    ("damage", "fault"),
    [("edited", Fault.UNREADABLE), ("removed", Fault.MISSING), ("replaced", Fault.INPUT_DIFFERS)],
)
def test_a_decision_that_was_tampered_with_is_found(ledger: Ledger, tmp_path: Path, damage: str, fault: Fault) -> None:
    for approved in (False, True):
        ledger.decisions.record(lambda so_far, approved=approved: Verdict(iteration=1, approved=approved))
    assert not [finding for one in verify(ledger) for finding in one.findings]
    file = tmp_path / layout.decision("toy", 1)
    if damage == "edited":
        file.write_text(file.read_text().replace('"approved": false', '"approved": true'))
    elif damage == "removed":
        file.unlink()
    else:  # with a digest that is right for what it says now
        fields = json.loads(file.read_text())
        del fields["digest"]
        file.write_bytes(canonical.seal({**fields, "by": "mallory"}))
    assert next(finding.fault for one in verify(reopened(ledger)) for finding in one.findings) is fault
    with pytest.raises(Damaged, match="decisions/"):
        reopened(ledger).decisions.all()


def test_a_run_that_is_being_deleted_takes_no_decision(ledger: Ledger) -> None:
    ledger.store.write(layout.run_manifest("toy"), canonical.seal({"run": "toy", "being_deleted_since": 1.0}))
    with pytest.raises(BeingDeleted):
        ledger.decisions.record(lambda so_far: Verdict(iteration=1, approved=True))
    assert not ledger.store.exists(layout.decision("toy", 1))


def test_a_decision_that_one_thread_records_while_another_reads_stays_known(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ledger.decisions.all() == ()
    read, made = ledger.store.read, list[Decision]()

    def record_meanwhile(path: str) -> bytes:
        monkeypatch.undo()
        try:
            return read(path)  # there is none yet
        finally:
            made.append(ledger.decisions.record(lambda so_far: Gate(iteration=1, cause="asked")))

    monkeypatch.setattr(ledger.store, "read", record_meanwhile)
    ledger.decisions.all()
    assert ledger.decisions.known == tuple(made)
