"""The log of calls: what a later attempt finds of earlier ones, and what an earlier one learns of a later."""

import time
from collections.abc import Sequence

import pyarrow as pa
import pytest

from cairn.engines.types.trajectories import CallKind, CallRecord
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import Attempt
from cairn.storage.logs.call_log import CallLog
from cairn.storage.store.errors import LeaseLost
from cairn.storage.store.store import Store
from cairn.tasks.generation.calls import call_records, call_table
from tests.storage.builders import CONFIG

pytestmark = pytest.mark.contract


@pytest.fixture
def ledger(store: Store) -> Ledger:
    ledger = Ledger.create(store, "run-1", CONFIG)
    ledger.acquire()
    return ledger


def record(order: int | None, result: str = "1", sample: int = 0, call: str | None = None) -> CallRecord:
    name = f"c{order}" if call is None else call
    return CallRecord(0, sample, name, CallKind.TOOL, "look", "0" * 64, order, result=result)


def opened(attempt: Attempt, inputs: str = "inputs") -> CallLog:
    return CallLog(attempt, inputs, encode=call_table)


def attempt_at(ledger: Ledger, shard: str = "00-000") -> Attempt:
    return ledger.attempt(0, Step.ROLLOUT, shard)


def written(attempt: Attempt, *records: CallRecord, inputs: str = "inputs") -> None:
    with opened(attempt, inputs) as log:
        log.append(*records)


def summary(table: pa.Table) -> list[tuple[int, int | None, str | None]]:
    return [(one.index, one.order, one.result) for one in call_records(table)]


def recovered(ledger: Ledger) -> list[tuple[int, int | None, str | None]]:
    with opened(attempt_at(ledger)) as log:
        return summary(log.recovered)


def test_a_later_attempt_finds_the_answers_of_a_sample_in_their_order_and_intents(ledger: Ledger) -> None:
    attempt = attempt_at(ledger)
    with opened(attempt) as log:
        log.append(record(0), record(0, sample=1))
        log.append(record(None, call="c1"), record(1, "2", sample=1))
    assert recovered(ledger) == [(0, 0, "1"), (1, 0, "1"), (1, 1, "2"), (0, None, "1")]
    assert len(attempt.superseded) >= 2


def test_of_other_shards_and_inputs_and_torn_parts_nothing_counts(ledger: Ledger) -> None:
    written(attempt_at(ledger, "00-001"), record(0))
    written(attempt_at(ledger), record(0), inputs="others")
    written(torn := attempt_at(ledger), record(0))
    part = max(path for path in torn.superseded if torn.name in path)
    ledger.store.write(part, ledger.store.read(part)[:-1])
    assert recovered(ledger) == []


@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [
        ([0, 1, 2], [1], [(0, "old"), (1, "new")]),
        ([0, 1, 2], [3], [(0, "old"), (1, "old"), (2, "old"), (3, "new")]),
        ([0, 1, 2], [], [(0, "old"), (1, "old"), (2, "old")]),
        ([], [0, 1], [(0, "new"), (1, "new")]),
        ([0], [2], [(0, "old")]),
    ],
)
def test_from_where_a_later_attempt_went_on_what_an_earlier_one_still_did_does_not_count(
    ledger: Ledger, earlier: Sequence[int], later: Sequence[int], expected: Sequence[tuple[int, str]]
) -> None:
    written(attempt_at(ledger), *(record(order, "old") for order in earlier))
    written(attempt_at(ledger), *(record(order, "new") for order in later))
    assert recovered(ledger) == [(0, order, result) for order, result in expected]


def test_of_two_attempts_that_know_nothing_of_each_other_the_later_reads_the_intent_or_the_earlier_is_not_to_act(
    ledger: Ledger,
) -> None:
    acted: list[str] = []
    earlier = opened(attempt_at(ledger))
    earlier.append(record(None, call="before"), then=lambda: acted.append("before"), urgent=True)
    earlier.append(then=lambda: acted.append("after it"))
    while len(acted) < 2:
        pass
    with opened(attempt_at(ledger)) as later:
        assert [one.call for one in call_records(later.recovered)] == ["before"]
        earlier.append(record(None, call="too late"), then=lambda: acted.append("too late"), urgent=True)
        with pytest.raises(LeaseLost, match="is not the newest attempt"):
            earlier.close()
        assert acted == ["before", "after it"]
        later.append(record(None, call="own"), then=lambda: acted.append("own"), urgent=True)
    assert acted[-1] == "own"
    assert {one.call for one in call_records(opened(attempt_at(ledger)).recovered)} == {"before", "own"}


def test_what_is_answered_after_a_later_attempt_has_begun_never_counts(ledger: Ledger) -> None:
    with opened(attempt_at(ledger)) as earlier:
        earlier.append(record(0))
        while earlier._waiting or len(earlier._attempt.superseded) < 2:
            time.sleep(0.01)
        with opened(attempt_at(ledger)) as later:
            assert summary(later.recovered) == [(0, 0, "1")]
            earlier.append(record(1, "2"), record(0, "3", sample=1))
    assert recovered(ledger) == [(0, 0, "1")]
    assert recovered(ledger) == [(0, 0, "1")], "nor after one that found it, and said so"


def test_a_driver_that_was_taken_over_is_not_heard_though_it_has_written_nothing_before(ledger: Ledger) -> None:
    late = attempt_at(ledger)
    ledger.acquire(takeover=True)
    written(attempt_at(ledger), record(0, "new", sample=1))
    with opened(late) as log:
        log.append(record(0, "old"), record(0, "old", sample=1))
    written(Attempt(ledger.store, "run-1", 0, Step.ROLLOUT, "00-000", "00-000.000001-abcdef"), record(0, "older"))
    assert recovered(ledger) == [(1, 0, "new")]
