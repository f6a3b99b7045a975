"""`collector`: what no commit names goes, what anyone may need stays."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.logs.sample_log import SampleLog
from cairn.storage.store.local import LocalStore
from cairn.storage.store.s3 import S3Store
from cairn.storage.store.store import Store, Unfinished
from cairn.storage.upkeep.collector import Reason, collect, garbage
from cairn.storage.upkeep.verification import verify
from tests.storage.builders import CONFIG, commit_step, rollout_table
from tests.waiting import wait_for

INPUTS = "1" * 64


@pytest.fixture
def ledger(store: Store) -> Ledger:
    """Two iterations of two steps, the second not complete, owned by this process."""
    ledger = Ledger.create(store, "run-1", CONFIG)
    ledger.acquire()
    for step in (Step.ROLLOUT, Step.REWARD):
        commit_step(ledger, 0, step, "00-000", table=rollout_table([0]))
    commit_step(ledger, 1, Step.ROLLOUT, "00-000", table=rollout_table([1]))
    return ledger


def _files(ledger: Ledger) -> dict[str, int]:
    """Those of the run and their sizes, without the lease, which is renewed all the time."""
    files = ledger.store.find(layout.run(ledger.run))
    return {path: size for path, size in files.items() if "/leases/" not in path}


def _reasons(ledger: Ledger) -> dict[str, Reason]:
    return {one.path: one.reason for one in garbage(ledger)}


def _log_group(ledger: Ledger, iteration: int, shard: str, group: int) -> str:
    """An attempt that died after it had one group; the path of its part."""
    attempt = ledger.attempt(iteration, Step.ROLLOUT, shard)
    with SampleLog(attempt, INPUTS) as log:
        log.append(rollout_table([group]))
    (path,) = ledger.store.find(attempt.folder)
    return path


def test_a_run_without_accidents_has_no_garbage(ledger: Ledger) -> None:
    assert _reasons(ledger) == {}


def test_a_beaten_attempt_and_parts_beside_the_committed_file_go_and_nothing_else(ledger: Ledger) -> None:
    beaten = ledger.attempt(0, Step.REWARD, "00-000").path("rewards.parquet")
    ledger.store.write(beaten, b"x")
    lost = _log_group(ledger, 0, "00-000", 0)
    commit = ledger.find(1, Step.ROLLOUT, "00-000")
    assert commit is not None
    part = f"{ledger.folder_of(commit)}/write_ahead/000000.{'0' * 64}.arrow"
    ledger.store.write(part, b"x")
    expected = {
        beaten: Reason.LOST,
        lost: Reason.LOST,
        part: Reason.SUPERSEDED,
    }
    assert _reasons(ledger) == expected
    files = _files(ledger)
    assert {path: files[path] for path in expected} == {one.path: one.bytes for one in garbage(ledger)}

    collect(ledger, garbage(ledger))
    assert set(_files(ledger)) == set(files) - set(expected)
    assert _reasons(ledger) == {}
    assert [finding for one in verify(ledger) for finding in one.findings] == []
    assert layout.attempt_folder(lost).rpartition("/")[2] + "/" not in ledger.store.list(
        layout.attempts("run-1", 0, Step.ROLLOUT)
    )


@pytest.mark.parametrize("driver", ["live", "ended"])
def test_groups_that_the_next_driver_takes_over_stay(ledger: Ledger, driver: str) -> None:
    part = _log_group(ledger, 1, "00-001", 7)
    if driver == "ended":
        assert ledger.lease is not None
        ledger.lease.release(Outcome.STOPPED)
    collect(ledger, garbage(ledger))
    assert ledger.store.exists(part)
    ledger.acquire(takeover=True)
    with SampleLog(ledger.attempt(1, Step.ROLLOUT, "00-001"), INPUTS) as log:
        assert log.recover()["group_id"].to_pylist() == [7, 7]


def test_a_step_that_the_run_went_on_without_is_abandoned_once_its_driver_is_gone(ledger: Ledger) -> None:
    part = _log_group(ledger, 0, "00-001", 7)
    assert _reasons(ledger) == {}
    assert ledger.lease is not None
    ledger.lease.release(Outcome.STOPPED)
    assert _reasons(ledger) == {part: Reason.ABANDONED}


def test_collecting_over_and_over_beside_a_driver_at_work_takes_nothing_that_it_commits(ledger: Ledger) -> None:
    done = threading.Event()

    rounds = [0, 0]

    def collect_until_done(collector: int) -> None:
        while not done.is_set():
            collect(ledger, garbage(ledger))
            rounds[collector] += 1

    with ThreadPoolExecutor(2) as pool:
        collectors = [pool.submit(collect_until_done, collector) for collector in range(2)]
        try:
            for iteration in range(1, 6):
                for shard in ("00-001", "00-002"):
                    attempt = ledger.attempt(iteration, Step.ROLLOUT, shard)
                    with SampleLog(attempt, INPUTS) as log:
                        log.append(rollout_table([iteration]))
                    commit_step(ledger, iteration, Step.ROLLOUT, shard, attempt=attempt, table=rollout_table([1]))
            wait_for(lambda: min(rounds) > 1 or any(collector.done() for collector in collectors))
        finally:
            done.set()
    for collector in collectors:
        collector.result()
    assert [finding for one in verify(ledger) for finding in one.findings] == []
    assert set(_reasons(ledger).values()) <= {Reason.SUPERSEDED}


def test_a_temporary_file_goes_at_once_after_its_driver_and_after_a_day_beside_it(tmp_path: Path) -> None:
    ledger = Ledger.create(LocalStore(str(tmp_path)), "run-1", CONFIG)
    lease = ledger.acquire()
    commit = commit_step(ledger, 0, Step.ROLLOUT, table=rollout_table([0]))
    torn = tmp_path / ledger.folder_of(commit) / ".0f.tmp"
    torn.write_bytes(b"half")
    path = torn.relative_to(tmp_path).as_posix()
    assert _reasons(ledger) == {}
    os.utime(torn, (time.time() - 25 * 3600,) * 2)
    assert _reasons(ledger) == {path: Reason.UNFINISHED}
    os.utime(torn)
    lease.release(Outcome.STOPPED)
    assert _reasons(ledger) == {path: Reason.UNFINISHED}
    collect(ledger, garbage(ledger))
    assert not torn.exists()


class _BeginningStore(LocalStore):
    """A driver begins to write to the run at the first call of a method."""

    begins_at = ""

    def begin(self, method: str) -> None:
        if method != self.begins_at:
            return
        self.begins_at = ""
        ledger = Ledger.open(self, "run-1")
        ledger.acquire()
        self.written = self.root / ledger.attempt(1, Step.ROLLOUT).folder / ".0f.tmp"
        self.written.parent.mkdir(parents=True)
        self.written.write_bytes(b"half")
        os.utime(self.written, (time.time(),) * 2)

    def find(self, folder: str) -> dict[str, int]:
        self.begin("find")
        return super().find(folder)

    def unfinished(self, folder: str) -> list[Unfinished]:
        self.begin("unfinished")
        return super().unfinished(folder)


@pytest.mark.parametrize("begins_at", ["find", "unfinished"])
def test_what_a_driver_writes_that_begins_meanwhile_is_no_garbage(tmp_path: Path, begins_at: str) -> None:
    store = _BeginningStore(str(tmp_path))
    ledger = Ledger.create(store, "run-1", CONFIG)
    lease = ledger.acquire()
    commit_step(ledger, 0, Step.ROLLOUT, table=rollout_table([0]))
    lease.release(Outcome.STOPPED)
    store.begins_at = begins_at
    collect(ledger, garbage(ledger))
    assert store.written.exists()


def test_an_upload_that_did_not_end_is_found_and_aborted(s3_url: str) -> None:
    store = S3Store(s3_url)
    ledger = Ledger.create(store, "run-1", CONFIG)
    path = layout.attempt("run-1", 0, Step.CHECKPOINT, "000001-0f") + "/big"
    bucket, _, key = f"{s3_url}/{path}".removeprefix("s3://").partition("/")
    store._s3.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    assert _reasons(ledger) == {path: Reason.UNFINISHED}
    collect(ledger, garbage(ledger))
    assert _reasons(ledger) == {}
