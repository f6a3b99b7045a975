"""A run whose disk is full stops with a sentence, and goes on when there is room, as if nothing had been."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs.schema.run import RunConfig
from flows.iteration import iteration
from storage.collector import garbage
from storage.commits import Step
from storage.errors import StoreRefused
from storage.ledger import Ledger
from storage.store import open_store
from storage.verification import verify
from tasks.context import RunContext
from tasks.events import Message, StepCommitted, StepStarted
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, Events, tiny_config, tiny_context, train_digests

pytestmark = pytest.mark.slow

if os.geteuid() != 0:
    pytest.skip("mounting a disk of its own needs root", allow_module_level=True)

SIZE = 64 * 1024**2
ITERATIONS = 2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk."""
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        try:
            while True:
                file.write(bytes(4096))
                file.flush()
        except OSError:
            return ballast


@pytest.mark.timeout(600)
def test_a_store_that_is_full_at_any_step_costs_nothing_that_was_committed(tiny_assets: Path, disk: Path) -> None:
    config = tiny_config(tiny_assets, checkpoint={"save_interval": 1}, rollout={"num_rollout": ITERATIONS})
    with tiny_context(str(disk / "whole"), config) as (run, _):
        expected = drive(run)
    for step in (Step.ROLLOUT, Step.REWARD, Step.FILTER, Step.ADVANTAGE, Step.TRAIN, Step.CHECKPOINT, Step.SYNC):
        store_url = str(disk / f"full-at-{step}")
        told = Events()
        with pytest.raises(StoreRefused, match=r"no space is left on the device; free some"):
            drive_until_full(store_url, config, disk, step, told)
        (disk / "ballast").unlink()
        before = {event.commit.digest for event in told if isinstance(event, StepCommitted)}
        assert before
        with tiny_context(store_url, config, fleet=LocalFleet(config)) as (run, _):
            assert drive(run) == expected
        ledger = Ledger.open(open_store(store_url), "tiny")
        found = {commit.digest for index in ledger.iterations() for commit in ledger.commits(index)}
        assert before <= found
        assert not [finding for verified in verify(ledger) for finding in verified.findings]
        for left in garbage(ledger):
            ledger.store.delete(left.path)
        assert not list(garbage(ledger))


def drive_until_full(store_url: str, config: RunConfig, disk: Path, step: Step, told: Events) -> None:
    with tiny_context(store_url, config) as (run, _):
        run.emit = filling(disk, step, told.append)
        drive(run)


def filling(
    disk: Path, step: Step, emit: Callable[[StepStarted | StepCommitted | Message], None]
) -> Callable[[StepStarted | StepCommitted | Message], None]:
    """Tell as before, and fill the disk when a step of the second iteration begins."""

    def tell(event: StepStarted | StepCommitted | Message) -> None:
        if isinstance(event, StepStarted) and (event.iteration, event.step) == (1, step):
            fill(disk)
        emit(event)

    return tell


def drive(run: RunContext) -> list[str | None]:
    for index in range(ITERATIONS):
        iteration(run, DirectSteps(run), index)
    return train_digests(run, range(ITERATIONS))
