"""A run whose disk is full stops with a sentence, and goes on when there is room, as if nothing had been."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.flows.iteration import iteration
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.store.errors import NoSpace
from cairn.storage.upkeep.collector import garbage
from cairn.storage.upkeep.verification import verify
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message, StepCommitted, StepStarted
from tests.local_fleet import LocalFleet
from tests.small_disk import fill, small_disk, why_not
from tests.tiny_run import DirectSteps, Events, tiny_config, tiny_context, train_digests

pytestmark = pytest.mark.proof

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

SIZE = 64 * 1024**2
ITERATIONS = 2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", SIZE) as path:
        yield path


@pytest.mark.timeout(600)
def test_a_store_that_is_full_at_any_step_costs_nothing_that_was_committed(tiny_assets: Path, disk: Path) -> None:
    config = tiny_config(tiny_assets, checkpoint={"save_interval": 1}, rollout={"num_rollout": ITERATIONS})
    with tiny_context(str(disk / "whole"), config) as (run, _):
        expected = drive(run)
    for step in (Step.ROLLOUT, Step.REWARD, Step.FILTER, Step.ADVANTAGE, Step.TRAIN, Step.CHECKPOINT, Step.SYNC):
        store_url = str(disk / f"full-at-{step}")
        events = Events()
        with pytest.raises(NoSpace, match=r"no space is left on the device; free some"):
            drive_until_full(store_url, config, disk, step, events)
        assert not uncommitted(Ledger.open(open_store(store_url), "tiny"))
        (disk / "ballast").unlink()
        before = {event.commit.digest for event in events if isinstance(event, StepCommitted)}
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


def drive_until_full(store_url: str, config: RunConfig, disk: Path, step: Step, events: Events) -> None:
    with tiny_context(store_url, config) as (run, _):
        run.emit = filling(disk, Path(store_url), step, events.append)
        drive(run)


def filling(
    disk: Path, store: Path, step: Step, emit: Callable[[StepStarted | StepCommitted | Message], None]
) -> Callable[[StepStarted | StepCommitted | Message], None]:
    """Tell as before, and fill the disk when a step of the second iteration begins."""

    def tell(event: StepStarted | StepCommitted | Message) -> None:
        if isinstance(event, StepStarted) and (event.iteration, event.step) == (1, step):
            weights = [file.stat().st_size for file in store.rglob("*.part")]
            fill(disk, leaving=weights[0] // 2 if step is Step.CHECKPOINT else 0)
        emit(event)

    return tell


def uncommitted(ledger: Ledger) -> list[str]:
    """Files of the second iteration that no commit names, finished groups aside: those the next attempt takes over."""
    committed = {layout.in_run(commit.run, out.path) for commit in ledger.commits(1) for out in commit.outputs}
    files = ledger.store.find(layout.iteration(ledger.run, 1)).keys() - committed - set(ledger.markers(1))
    return [path for path in files if "/write_ahead/" not in path]


def drive(run: RunContext) -> list[str | None]:
    for index in range(ITERATIONS):
        iteration(run, DirectSteps(run), index)
    return train_digests(run, range(ITERATIONS))
