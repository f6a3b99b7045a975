"""Every log whose newest part ends at any byte: what was finished before it is recovered, and nothing else."""

import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.engines.types.trajectories import CallKind, CallRecord
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.snapshots import Attempt, AttemptFolder
from cairn.storage.logs.call_log import CallLog
from cairn.storage.logs.paced import PacedWriter
from cairn.storage.logs.sample_log import SampleLog
from cairn.storage.opening import open_store
from cairn.storage.store.store import Store
from cairn.tasks.generation.calls import call_table
from tests.storage.builders import rollout_table
from tests.waiting import wait_for

GROUPS = range(12)
INPUTS = "1" * 64


def samples_log(store: Store, driver: int) -> tuple[PacedWriter, pa.Table]:
    log = SampleLog(Attempt(store, "run", 0, Step.ROLLOUT, "00-000", f"00-000.{driver:06d}-ab"), INPUTS)
    return log, log.recover()


def calls_log(store: Store, driver: int) -> tuple[PacedWriter, pa.Table]:
    attempt = Attempt(store, "run", 0, Step.ROLLOUT, "00-000", f"00-000.{driver:06d}-ab")
    log = CallLog(attempt, INPUTS, encode=pa.concat_tables)
    return log, log.recovered


def folder(store: Store, driver: int) -> AttemptFolder:
    return AttemptFolder(store, layout.stream("run"), f"{driver:06d}-ab", root=layout.run("run"))


def stream_log(store: Store, driver: int) -> tuple[PacedWriter, pa.Table]:
    log = SampleLog(folder(store, driver), INPUTS, groups=GROUPS)
    return log, log.recover()


def stream_calls_log(store: Store, driver: int) -> tuple[PacedWriter, pa.Table]:
    log = CallLog(folder(store, driver), INPUTS, encode=pa.concat_tables, groups=GROUPS)
    return log, log.recovered


def call_rows(groups: Sequence[int]) -> pa.Table:
    return call_table([CallRecord(id, 0, "c0", CallKind.TOOL, "look", "0" * 64, 0, result=str(id)) for id in groups])


def sample_rows(groups: Sequence[int]) -> pa.Table:
    return pa.concat_tables([rollout_table([id], samples=1, seed=id) for id in groups])


LOGS: dict[str, tuple[Callable[[Store, int], tuple[PacedWriter, pa.Table]], Callable[[Sequence[int]], pa.Table]]] = {
    "write-ahead": (samples_log, sample_rows),
    "calls": (calls_log, call_rows),
    "stream": (stream_log, sample_rows),
    "stream calls": (stream_calls_log, call_rows),
}
"""How a driver begins each log, with what it recovers, and rows of groups to write to it."""


@st.composite
def histories(draw: st.DrawFn) -> list[list[list[int]]]:
    """Groups that drivers, one after the other, finish: some in each part of each driver's log."""
    sizes = draw(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=2), min_size=1, max_size=3))
    ids = iter(GROUPS)
    return [[[next(ids) for _ in range(size)] for size in driver] for driver in sizes]


@pytest.mark.parametrize("kind", LOGS)
@settings(max_examples=15)
@given(history=histories(), at=st.floats(0, 1), flip=st.booleans())
def test_what_was_finished_before_a_torn_part_is_recovered_again_and_again(
    kind: str, history: list[list[list[int]]], at: float, flip: bool
) -> None:
    begin, rows = LOGS[kind]
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.storage.logs.paced.PACE", 0.0)
        store = open_store(root)
        finished: list[int] = []
        for number, parts in enumerate(history):
            log, found = begin(store, number)
            assert groups_of(found) == finished
            with log:
                for part in parts:
                    append(log, rows(part))
                    finished += part
        newest = max((path for path in Path(root).rglob("*.arrow")), key=lambda path: path.stat().st_mtime_ns)
        data = newest.read_bytes()
        end = min(int(at * len(data)), len(data) - 1)
        newest.write_bytes(data[:end] + bytes([data[end] ^ 1]) + data[end + 1 :] if flip else data[:end])
        last = history[-1][-1]
        for recovery in range(2):
            log, found = begin(store, len(history) + recovery)
            log.close()
            assert groups_of(found) == [id for id in finished if id not in last]
            expected = rows([id for id in finished if id not in last]) if len(finished) > len(last) else found[:0]
            assert found.sort_by("group_id").equals(expected.combine_chunks())


def append(log: PacedWriter, table: pa.Table) -> None:
    """As a part of its own."""
    durable = threading.Event()
    log.append(table, then=durable.set, urgent=True)
    assert durable.wait(60)


def groups_of(table: pa.Table) -> Collection[Any]:
    return sorted(table["group_id"].to_pylist())


def test_callers_waiting_for_items_that_never_become_durable_get_the_error() -> None:
    outcomes, breaking = list[str](), threading.Event()

    def write(items: list[Any]) -> None:
        if items != [1]:
            breaking.wait(60)
            raise OSError("the disk is gone")

    log = PacedWriter(write, "a log")
    log.append(1, then=lambda: outcomes.append("durable"), otherwise=lambda: outcomes.append("never"), urgent=True)
    wait_for(lambda: outcomes == ["durable"])
    log.append(2, then=lambda: outcomes.append("durable"), otherwise=lambda: outcomes.append("never"), urgent=True)
    log.append(3, then=lambda: outcomes.append("durable"), otherwise=lambda: 1 / 0)
    log.append(4, then=lambda: outcomes.append("durable"), otherwise=lambda: outcomes.append("never"))
    breaking.set()
    wait_for(lambda: len(outcomes) == 3)
    assert outcomes == ["durable", "never", "never"]
    for call in (log.require_intact, log.close, lambda: log.append(5)):
        with pytest.raises(OSError, match="the disk is gone"):
            call()
