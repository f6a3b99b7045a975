"""A network that parts a driver from its store: a while costs time alone, and whoever was succeeded meanwhile stops."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import Lease, Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.store.errors import LeaseLost
from cairn.storage.upkeep.verification import verify
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message, StepCommitted, StepStarted
from tests.network import Host, host, why_not
from tests.s3 import S3Server, moto_server, use_server
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

ITERATIONS = 2
AWAY = 20.0
"""Seconds without a network: connections are given up after 5, and an operation after 60."""


@pytest.fixture(scope="module")
def store_host() -> Iterator[Host]:
    with host() as other:
        yield other


@pytest.fixture(scope="module")
def server(store_host: Host) -> Iterator[S3Server]:
    """A store on a machine of its own."""
    with moto_server(at=store_host.there, start=store_host.popen) as server:
        yield server


@pytest.fixture
def store_url(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    use_server(monkeypatch, server)
    return f"s3://{server.new_bucket()}/runs"


def drive(run: RunContext) -> list[str | None]:
    for index in range(ITERATIONS):
        iteration(run, DirectSteps(run), index)
    return train_digests(run, range(ITERATIONS))


def at(step: Step, do: Callable[[], None], emit: Callable[..., None]) -> Callable[..., None]:
    """Tell as before, and do something when a step of the second iteration begins."""

    def tell(event: StepStarted | StepCommitted | Message) -> None:
        if isinstance(event, StepStarted) and (event.iteration, event.step) == (1, step):
            do()
        emit(event)

    return tell


def test_a_partition_from_the_store_costs_time_and_nothing_else(
    tiny_assets: Path, tmp_path: Path, store_url: str, store_host: Host
) -> None:
    config = tiny_config(tiny_assets, rollout={"num_rollout": ITERATIONS})
    with tiny_context(str(tmp_path), config) as (run, _):
        expected = drive(run)
    mending: list[threading.Timer] = []

    def part() -> None:
        store_host.cut()
        mending.append(threading.Timer(AWAY, store_host.mend))
        mending[0].start()

    with tiny_context(store_url, config) as (run, events):
        run.emit = at(Step.TRAIN, part, events.append)
        assert drive(run) == expected
    assert not mending[0].is_alive(), "the run waited for the network"
    ledger = Ledger.open(open_store(store_url), "tiny")
    assert not [finding for verified in verify(ledger) for finding in verified.findings]
    assert {commit.epoch for index in ledger.iterations() for commit in ledger.commits(index)} == {1}


@pytest.mark.proof
def test_a_driver_that_was_succeeded_behind_a_partition_commits_nothing_more(
    tiny_assets: Path, store_url: str, store_host: Host
) -> None:
    config = tiny_config(tiny_assets, rollout={"num_rollout": ITERATIONS})
    successors: list[Lease] = []

    def succeed() -> None:
        """On the other side of the partition somebody takes the run; then the network comes back."""
        successors.append(Lease.acquire(open_store(store_url), "tiny", takeover=True))
        store_host.cut()
        threading.Timer(3.0, store_host.mend).start()

    with tiny_context(store_url, config) as (run, events):
        run.emit = at(Step.ADVANTAGE, succeed, events.append)
        with pytest.raises(LeaseLost, match="was taken over by"):
            drive(run)
    ledger = Ledger.open(open_store(store_url), "tiny")
    assert ledger.find(1, Step.ADVANTAGE) is None
    assert {commit.epoch for index in ledger.iterations() for commit in ledger.commits(index)} == {1}
    successors[0].check()
    successors[0].release(Outcome.STOPPED)
