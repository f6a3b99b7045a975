"""What a long run on an object store costs to go on with and to look at: `bench.ledger` without its gateway."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench import store_counts
from bench.ledger import WHOLE, CountingStore, commits_of, config_of, files_of, release, resume
from cairn.flows.reading.views import RunState, run_status
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.store.local import LocalStore

ITERATIONS = 405
"""With more evaluations and checkpoints than `MOST`. That pages of a thousand names are few, `tests.storage` proves."""

MOST = 30
"""Requests."""
ROUND = [f"00-{part:03d}" for part in range(256)]
"""Shards of a large round, with 16 records in the newest iteration."""


def evaluations(run: str) -> Iterator[tuple[str, bytes]]:
    """Files of evaluations, which a status reads however long ago they were made."""
    evals = (commit for commit in commits_of(run, ITERATIONS) if commit.step is Step.EVAL)
    yield from ((commit.path, commit.to_bytes()) for commit in evals)


class Requests:
    """Counts what an object store would need for the calls of a store on local files."""

    made = 0

    def add(self, operation: str, path: str, written: int = 0) -> None:
        self.made += 1


class Counted(LocalStore):
    """A store whose calls `Requests` counts."""


def test_a_resume_with_a_round_of_256_shards_takes_few_requests_however_long_the_run(tmp_path: Path) -> None:
    plain = LocalStore(str(tmp_path))
    lease = Ledger.create(plain, "long", config_of(10_000).model_dump(mode="json")).acquire()
    lease.iteration = 9_999
    lease.release(Outcome.STOPPED)
    for path, data in files_of("long", 10_000, ROUND, first=9_989):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    requests = Requests()
    store_counts._count_local(requests, Counted)  # type: ignore[arg-type]
    run = resume(Counted(str(tmp_path)), "long", ROUND)
    assert 20 <= requests.made <= 24
    release(run)


@pytest.mark.slow
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
    run = resume(store, "long")
    assert store.requests <= MOST
    release(run)
