"""What a long run on an object store costs to go on with and to look at: `bench.ledger` without its gateway."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.ledger import WHOLE, CountingStore, commits_of, config_of, files_of, resume_requests
from cairn.flows.reading.views import RunState, run_status
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger

pytestmark = pytest.mark.slow

ITERATIONS = 405
"""With more evaluations and checkpoints than `MOST`. That pages of a thousand names are few, `tests.storage` proves."""

MOST = 30
"""Requests."""


def evaluations(run: str) -> Iterator[tuple[str, bytes]]:
    """Files of evaluations, which a status reads however long ago they were made."""
    evals = (commit for commit in commits_of(run, ITERATIONS) if commit.step is Step.EVAL)
    yield from ((commit.path, commit.to_bytes()) for commit in evals)


def test_resume_and_status_of_a_long_run_take_at_most_thirty_requests_each(s3_url: str) -> None:
    store = CountingStore(s3_url)
    ledger = Ledger.create(store, "long", config_of(ITERATIONS).model_dump(mode="json"))
    ledger.acquire().release(Outcome.STOPPED)
    files = {layout.commit("long", index, Step.TRAIN): b"not read" for index in range(ITERATIONS - WHOLE)}
    files |= {**dict(evaluations("long")), **dict(files_of("long", ITERATIONS, first=ITERATIONS - WHOLE))}
    with ThreadPoolExecutor(16) as writers:
        list(writers.map(store.write, files, files.values()))

    store.requests = 0
    status = run_status(store, "long")
    assert store.requests <= MOST
    assert (status.state, status.iteration, status.step) == (RunState.INTERRUPTED, ITERATIONS - 1, Step.SYNC)

    store.requests = 0
    lease = resume_requests(store, "long")
    assert store.requests <= MOST
    lease.release(Outcome.STOPPED)
