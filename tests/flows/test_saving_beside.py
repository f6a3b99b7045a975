"""Checkpoints and versions of the weights are written while the next iterations run, and their commits follow."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.flows.pipeline import Pipeline
from cairn.flows.train import first_to_execute
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.publications import stored
from cairn.storage.opening import open_store
from cairn.storage.store.errors import StoreError
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.step import DurableStep
from cairn.tasks.halves import publish_for_open_halves
from cairn.tasks.trainer.stored_weights import read_weights
from tests.forks import FORKS
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

ITERATIONS = 3


class Beside(DirectSteps):
    """Runs submitted steps in threads, and a checkpoint that the store refused once more."""

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self._pool = ThreadPoolExecutor(4)

    def submit(
        self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any
    ) -> "Future[Commit]":
        def execute() -> Commit:
            try:
                return self.call(step, index, shard, *args, **kwargs)
            except StoreError:
                return self.call(step, index, shard, *args, **kwargs)

        return self._pool.submit(execute)


def tiny(assets: Path) -> RunConfig:
    return tiny_config(assets, rollout={"num_rollout": ITERATIONS}, checkpoint={"save_interval": 1})


def drive(run: RunContext, saved: Callable[[], None] = lambda: None) -> None:
    pipeline = Pipeline(
        run,
        Beside(run),
        first_to_execute(run),
        learned=lambda index: None,
        saved=saved,
        stop=run.stopping.set,
    )
    with closing(pipeline.run(pipeline.iterate, ITERATIONS)) as iterations:
        assert [index for index, _ in iterations][-1] == ITERATIONS - 1


BeforeWrites = Callable[[RunContext, LocalFleet, Callable[[int], None]], None]


def after_update(run: RunContext, fleet: LocalFleet, iteration: int, then: Callable[[int], None]) -> None:
    """Let no checkpoint before `iteration` be written before its update is committed, and call `then` before each write
    with its number."""
    committed, write, commit = threading.Event(), fleet.training.write_copy, run.commit
    writes: list[int] = []

    def written(*args: Any) -> Any:
        writes.append(len(writes))
        if writes[-1] == iteration - 1:
            assert committed.wait(120)
        then(writes[-1])
        return write(*args)

    def noted(**fields: Any) -> Commit:
        made = commit(**fields)
        if (fields["iteration"], fields["step"]) == (iteration, Step.TRAIN):
            committed.set()
        return made

    fleet.training.write_copy = written  # type: ignore[method-assign]
    run.commit = noted  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def whole_run(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str | None]]:
    """Store and digests of a run that nothing disturbed."""
    store = tmp_path_factory.mktemp("undisturbed")
    with tiny_context(str(store), tiny(tiny_assets)) as (run, _):
        drive(run)
        return store, train_digests(run, range(ITERATIONS))


@pytest.fixture
def undisturbed(whole_run: tuple[Path, list[str | None]]) -> list[str | None]:
    return whole_run[1]


def test_the_next_update_is_made_while_a_checkpoint_is_written_and_a_refused_one_is_of_the_same_copy(
    tiny_assets: Path, tmp_path: Path, undisturbed: list[str | None]
) -> None:
    config = tiny(tiny_assets)
    fleet = LocalFleet(config)
    saved: list[int] = []

    def refuse_first(number: int) -> None:
        if number == 0:
            raise StoreError("no answer")

    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        after_update(run, fleet, 1, refuse_first)
        drive(run, lambda: saved.append(len(saved)))
        commits = [run.committed(index, Step.CHECKPOINT) for index in range(ITERATIONS)]
        assert commits[0].committed_at > run.committed(1, Step.TRAIN).committed_at
        assert all(stored(run.committed(index, Step.SYNC)).base is None for index in range(ITERATIONS)), "whole"
        for index, commit in enumerate(commits):
            assert commit.state_digest == undisturbed[index]
            fleet.training.load(str(tmp_path), run.ledger.folder_of(commit))
            assert fleet.training.engine.state_digest() == undisturbed[index]
        assert train_digests(run, range(ITERATIONS)) == undisturbed
    assert (fleet.training.updates, fleet.training.restarts) == (ITERATIONS, 0)
    assert len(saved) == ITERATIONS


def before_second_checkpoint(run: RunContext, fleet: LocalFleet, then: Callable[[int], None]) -> None:
    after_update(run, fleet, 2, then)


def be_killed(store: str, config: RunConfig, before_writes: BeforeWrites) -> None:
    """Drive a run and die before it writes what it has copied the second time."""
    fleet = LocalFleet(config)

    def die(number: int) -> None:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with tiny_context(store, config, fleet=fleet) as (run, _):
        before_writes(run, fleet, die)
        drive(run)


@pytest.mark.proof
def test_a_driver_killed_while_it_writes_leaves_no_checkpoint_and_the_next_begins_at_the_one_before(
    tiny_assets: Path, tmp_path: Path, undisturbed: list[str | None]
) -> None:
    config = tiny(tiny_assets)
    driver = FORKS.Process(target=be_killed, args=(str(tmp_path), config, before_second_checkpoint))
    driver.start()
    driver.join(300)
    assert driver.exitcode == -signal.SIGKILL
    with tiny_context(str(tmp_path), config) as (run, events):
        assert run.find(2, Step.TRAIN) is not None
        assert run.find(1, Step.CHECKPOINT) is None
        drive(run)
        assert train_digests(run, range(ITERATIONS)) == undisturbed
        assert run.find(1, Step.CHECKPOINT) is None
        assert run.find(2, Step.CHECKPOINT) is not None
    told = [getattr(event, "text", "") for event in events]
    assert any("from the checkpoint of iteration 0; 2 committed step(s) to replay" in text for text in told)


def test_a_checkpoint_that_was_not_written_is_made_where_the_next_update_was_not(
    tiny_assets: Path, tmp_path: Path, whole_run: tuple[Path, list[str | None]]
) -> None:
    config = tiny(tiny_assets)
    shutil.copytree(whole_run[0], tmp_path, dirs_exist_ok=True)
    store = open_store(str(tmp_path))
    for path in store.find("runs"):
        if path.endswith(("/000001/checkpoint.json", "/000002/train.json")):
            store.delete(path)
    with tiny_context(str(tmp_path), config) as (run, _):
        assert first_to_execute(run) == 1


def lagged(assets: Path) -> RunConfig:
    return tiny_config(assets, rollout={"num_rollout": ITERATIONS, "pipeline": "lagged", "dtype": "bfloat16"})


def write_after_update(run: RunContext, fleet: LocalFleet, then: Callable[[int], None]) -> None:
    """Let no version of the weights, up to the last but one, be written before the next update is committed. Call
    `then` before each write with its number."""
    committed, write, commit = [threading.Event() for _ in range(ITERATIONS)], fleet.training.write_version, run.commit
    writes: list[int] = []

    def written(*args: Any) -> Any:
        writes.append(len(writes))
        version = fleet.training.copied[0]
        if version < ITERATIONS:
            assert committed[version].wait(120)
        then(writes[-1])
        return write(*args)

    def noted(**fields: Any) -> Commit:
        made = commit(**fields)
        if fields["step"] is Step.TRAIN:
            committed[fields["iteration"]].set()
        return made

    fleet.training.write_version = written  # type: ignore[method-assign]
    run.commit = noted  # type: ignore[method-assign]


def test_weights_are_stored_while_the_next_update_is_made_and_a_refused_write_is_of_the_same_copy(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = lagged(tiny_assets)
    fleet = LocalFleet(config)

    def refuse_first(number: int) -> None:
        if number == 0:
            raise StoreError("no answer")

    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        write_after_update(run, fleet, refuse_first)
        drive(run)
        synced = [run.committed(index, Step.SYNC) for index in range(ITERATIONS)]
        assert [bool(how and how.base) for how in map(stored, synced)] == [False, True, False], (
            "whole with a checkpoint"
        )
        for index, commit in enumerate(synced):
            read_weights(run.ledger, commit)  # compares them with the digest
            if index + 1 < ITERATIONS:
                assert run.committed(index + 1, Step.TRAIN).committed_at < commit.committed_at
            later = [one for other in range(index + 2, ITERATIONS) for one in run.ledger.commits(other)]
            assert all(commit.committed_at < one.committed_at for one in later)
    assert (fleet.training.updates, fleet.training.restarts) == (ITERATIONS, 0)


@pytest.mark.proof
def test_weights_that_a_killed_driver_was_writing_are_stored_by_the_next_one(tiny_assets: Path, tmp_path: Path) -> None:
    config = lagged(tiny_assets)
    driver = FORKS.Process(target=be_killed, args=(str(tmp_path), config, write_after_update))
    driver.start()
    driver.join(300)
    assert driver.exitcode == -signal.SIGKILL
    with tiny_context(str(tmp_path), config) as (run, _):
        before = train_digests(run, range(ITERATIONS))
        assert run.find(1, Step.SYNC) is None
        assert first_to_execute(run) == 1
        publish_for_open_halves(run)
        drive(run)
        for index in range(ITERATIONS):
            read_weights(run.ledger, run.committed(index, Step.SYNC))  # compares them with the digest
        assert stored(run.committed(1, Step.SYNC)).base is None
        assert train_digests(run, range(ITERATIONS)) == before
