"""A driver that is told to end stops its work, saves what it can, and gives the run back in time."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.types import Completion, GenerateRequest
from cairn.flows.driver.preemption import SAME_KEY, Ending, Preempted, ending_in_order, save
from cairn.flows.driver.session import _releasing
from cairn.flows.driver.signals import EXIT_CODE
from cairn.flows.iteration import iteration
from cairn.flows.reading.views import run_status
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import Lease, Outcome, newest_lease
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.store.errors import StoreError
from cairn.tasks.durable.events import Message
from tests.forks import FORKS
from tests.local_fleet import LocalFleet, calls
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests
from tests.waiting import wait_for

GROUPS, SAMPLES = 6, 4


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    """Without checkpoints but the last, and with groups that finish one after the other."""
    rollout = {"rollout_batch_size": GROUPS, "n_samples_per_prompt": SAMPLES, "max_running_requests": SAMPLES}
    return tiny_config(tiny_assets, rollout={"num_rollout": 3, **rollout})


@pytest.fixture(scope="module")
def undisturbed(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> list[str | None]:
    with tiny_context(str(tmp_path_factory.mktemp("undisturbed")), config) as (run, _):
        for index in range(3):
            iteration(run, DirectSteps(run), index)
        return train_digests(run, range(3))


def noticed_fleet(config: RunConfig, ending: Ending, samples: int) -> LocalFleet:
    """Its driver is told to end when so many samples have finished; a generation lasts until somebody aborts it."""
    fleet = LocalFleet(config)
    engine: Any = fleet.rollout[0]
    generate, abort, aborted = engine.generate, engine.abort, []

    def generate_until_aborted(requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        nonlocal samples
        for completions in generate(requests):
            samples -= len(completions)
            yield completions
            if samples <= 0:
                ending.begin()
                wait_for(lambda: aborted)

    def note_and_abort() -> None:
        aborted.append(True)
        abort()

    engine.open, engine.abort = calls(generate_until_aborted), note_and_abort
    return fleet


def test_a_rollout_that_is_preempted_keeps_what_had_finished_and_the_weights_and_ends_in_the_same_bits(
    config: RunConfig, undisturbed: list[str | None], tmp_path: Path
) -> None:
    ending = Ending()
    fleet = noticed_fleet(config, ending, samples=SAMPLES * (2 * GROUPS + GROUPS // 2))  # within iteration 2

    def drive() -> None:
        with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _), ending.in_order():
            ending.set_run(run)
            for index in range(3):
                iteration(run, DirectSteps(run), index)

    with pytest.raises(Preempted):
        drive()
    ending.finish()
    ledger = Ledger.open(open_store(str(tmp_path)), "tiny")
    saved = ledger.find(1, Step.CHECKPOINT)
    assert saved is not None, "of the newest weights, although no checkpoint was due"
    assert ledger.find(2, Step.ROLLOUT, "00-000") is None
    assert run_status(ledger.store, "tiny").groups.waiting == GROUPS // 2

    with tiny_context(str(tmp_path), config) as (run, events):
        iteration(run, DirectSteps(run), 2)
        assert train_digests(run, range(3)) == undisturbed
        rollout = run.committed(2, Step.ROLLOUT, "00-000")
    assert rollout.metrics["recovered_groups"] == GROUPS // 2
    messages = [event.text for event in events if isinstance(event, Message)]
    assert "Restoring weight version 2 from the checkpoint of iteration 1; 0 committed step(s) to replay" in messages


def test_weights_are_saved_once_and_only_where_the_engine_holds_those_of_the_ledger(
    config: RunConfig, tmp_path: Path
) -> None:
    with tiny_context(str(tmp_path), config) as (run, _):
        assert save(run) is None, "there is nothing to save"
        iteration(run, DirectSteps(run), 0)
        run.fleet.training.restart()
        assert save(run) is None, "a restored engine would not hold more than the ledger"
    with tiny_context(str(tmp_path), config) as (run, _):
        iteration(run, DirectSteps(run), 1)
        saved = save(run)
        assert saved is not None
        assert (saved.iteration, saved.state_digest) == (1, train_digests(run, [1])[0])
        assert save(run) is None


def test_a_store_that_is_away_does_not_hide_what_ended_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*arguments: object) -> bool:
        raise StoreError("the store is away")

    store = open_store(str(tmp_path))
    lease = Lease.acquire(store, "run-1")
    monkeypatch.setattr(store, "create", away)
    with pytest.raises(KeyboardInterrupt) as ended, _releasing(lease):
        raise KeyboardInterrupt
    assert ended.value.__notes__ == ["StoreError meanwhile: the store is away"]


NOTICES = [signal.SIGTERM, signal.SIGUSR1]


def drive_nothing(said: Connection, store: Path, grace: float, then: str) -> None:
    """A driver with a lease and nothing to do, started with signals ignored as in a script's background."""
    for signum in (signal.SIGINT, *NOTICES):
        signal.signal(signum, signal.SIG_IGN)
    lease = Lease.acquire(open_store(str(store)), "run-1")
    try:
        with ending_in_order() as ending, ending.in_order():
            ending.set_lease(lease, grace)
            if then == "deaf":  # as within a flow, whose handler's exception may be swallowed
                signal.signal(signal.SIGTERM, lambda *_: None)
            try:
                said.send("ready")
                time.sleep(600)
            finally:
                said.send("stopping")
                time.sleep(600 if then == "linger" else 0)
    except Preempted:
        sys.exit(EXIT_CODE)
    except KeyboardInterrupt:
        sys.exit(130)


class Driver:
    """Its process."""

    def __init__(self, store: Path, then: str = "leave", grace: float = 600) -> None:
        self._said, child_end = FORKS.Pipe(duplex=False)
        self.process = FORKS.Process(target=drive_nothing, args=(child_end, store, grace, then))
        self.process.start()
        child_end.close()
        self.says("ready")

    def says(self, word: str) -> None:
        assert self._said.poll(60)
        assert self._said.recv() == word

    def send_signal(self, signum: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)

    def wait(self, seconds: float) -> int | None:
        self.process.join(seconds)
        return self.process.exitcode

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.join()


def outcome(store: Path) -> Outcome | None:
    lease = newest_lease(open_store(str(store)), "run-1")
    assert lease is not None
    return lease.outcome


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGINT])
def test_a_driver_is_told_to_end_whatever_disposition_of_its_signals_it_inherited(
    tmp_path: Path, signum: signal.Signals
) -> None:
    with Driver(tmp_path) as process:
        process.send_signal(signum)
        assert process.wait(60) == (130 if signum is signal.SIGINT else EXIT_CODE)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_a_driver_at_once_and_gives_the_run_back(tmp_path: Path, signum: signal.Signals) -> None:
    with Driver(tmp_path, "linger") as process:
        process.send_signal(signal.SIGTERM)
        process.says("stopping")
        process.send_signal(signum)
        assert process.wait(60) == EXIT_CODE
    assert outcome(tmp_path) is Outcome.PREEMPTED


def test_the_second_ctrl_c_ends_a_driver_at_once_and_gives_the_run_back(tmp_path: Path) -> None:
    with Driver(tmp_path, "linger") as process:
        process.send_signal(signal.SIGINT)
        process.says("stopping")
        process.send_signal(signal.SIGINT)  # the same key, as `uv run` passes it on
        time.sleep(SAME_KEY + 0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert outcome(tmp_path) is Outcome.STOPPED


@pytest.mark.parametrize("then", ["deaf", "linger"])
def test_the_end_of_the_grace_period_ends_a_driver_that_does_not_come_to_its_end(tmp_path: Path, then: str) -> None:
    with Driver(tmp_path, then, grace=1.0) as process:
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == EXIT_CODE
        assert time.monotonic() - began >= 1.0
    assert outcome(tmp_path) is Outcome.PREEMPTED
