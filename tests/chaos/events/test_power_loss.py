"""A machine that loses its power keeps every commit and every finished group that it has acknowledged, whole."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn.flows.iteration import iteration
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.redacted import Finding
from cairn.storage.logs.sample_log import SampleLog
from cairn.storage.opening import open_store
from cairn.storage.store.errors import StoreError
from cairn.storage.upkeep.verification import verify
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import StepCommitted
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests
from tests.volatile_disk import VolatileDisk, volatile_disk, why_not

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

FAILURES = 6
ITERATIONS = 2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[VolatileDisk]:
    with volatile_disk(tmp_path) as disk:
        yield disk


@pytest.fixture
def acknowledged(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Samples whose write-ahead record was written, by group."""
    groups: Counter[int] = Counter()
    write = SampleLog._write_part

    def writing(log: SampleLog, table: pa.Table, *args: Any, **options: Any) -> None:
        write(log, table, *args, **options)
        groups.update(table["group_id"].to_pylist())

    monkeypatch.setattr(SampleLog, "_write_part", writing)
    return groups


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_what_was_acknowledged_survives_a_power_failure_at_any_moment(
    tiny_assets: Path, disk: VolatileDisk, acknowledged: Counter[int], tmp_path: Path, share: float
) -> None:
    config = tiny_config(tiny_assets, checkpoint={"save_interval": 1}, rollout={"num_rollout": ITERATIONS})
    disk.power_on()
    with tiny_context(str(disk.path / "whole"), config) as (run, _):
        expected = drive(run)
    moments = disk.moments
    assert moments > 50  # of a run's flushes, links and renames
    dice = random.Random(7)
    for number, moment in enumerate(sorted(dice.sample(range(10, moments), FAILURES))):
        store_url = str(disk.path / f"struck-{number}")
        disk.power_on(seed=number, share=share)
        disk.power_fails_at(moment)
        acknowledged.clear()
        with suppress(StoreError, OSError), tiny_context(store_url, config) as (run, events):
            drive(run)
        disk.power_fails()  # at the latest: renewals of the lease come by the clock, and this run may have had fewer
        committed = {e.commit.name: e.commit.digest for e in events if isinstance(e, StepCommitted)}
        disk.power_on()
        store = open_store(store_url)
        if not store.exists("runs/tiny/run.json"):
            assert not committed
        else:
            found = Ledger.open(store, "tiny")
            survived = {commit.name: commit.digest for index in found.iterations() for commit in found.commits(index)}
            assert committed.items() <= survived.items()
            assert findings(found) == []
        finished = sum(count == config.rollout.n_samples_per_prompt for count in acknowledged.values())
        with tiny_context(store_url, config, fleet=LocalFleet(config)) as (run, events):
            assert drive(run) == expected
            fleet = run.fleet
            regenerated = sum(handle.generated_groups for handle in fleet.rollout)  # type: ignore[attr-defined]
        assert regenerated <= ITERATIONS * config.rollout.rollout_batch_size - finished, f"moment {moment}"
        assert findings(Ledger.open(store, "tiny")) == []


def findings(ledger: Ledger) -> list[Finding]:
    return [finding for verified in verify(ledger) for finding in verified.findings]


def drive(run: RunContext) -> list[str | None]:
    for index in range(ITERATIONS):
        iteration(run, DirectSteps(run), index)
    return train_digests(run, range(ITERATIONS))
