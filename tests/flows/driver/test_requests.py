"""What a driver requests of its store until its first step, with Prefect's server, and engines in this process."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from bench import store_counts
from cairn.configs.schema.run import RunConfig
from cairn.flows.driver import session
from cairn.flows.events import Event, Stopping
from cairn.flows.train import start
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.shards import Recorder
from cairn.storage.store.local import LocalStore
from cairn.tasks.durable.events import StepStarted
from tests.local_fleet import LocalFleet
from tests.tiny_run import tiny_config

MOST = 32
"""Requests, without five of the probe of the store, which the caller has made."""
SHARDS = 23
"""Shards of a round. It has 46 records, of which two have the commits of 16, and three those of 4."""
QUIET = 0.5
"""Seconds without a request after which the watchers have read what they read at the start."""


class Requests:
    """Counts what an object store would need for the calls of a store on local files."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()

    def add(self, operation: str, path: str, written: int = 0) -> None:
        if threading.current_thread().name != "lease-renewal":  # every five seconds
            self.made[f"{operation} {path}"] += 1

    def settled(self) -> Counter[str]:
        """Return those that were made once there are no more."""
        before = None
        while before != (before := self.made.total()):
            time.sleep(QUIET)
        return self.made


class Counted(LocalStore):
    """A store whose calls `Requests` counts."""


@contextmanager
def engines_here(config: RunConfig, *_: Any, **options: Any) -> Iterator[Any]:
    fleet: Any = LocalFleet(config)
    fleet.engines = [fleet.training, *fleet.rollout]
    yield lambda: fleet
    fleet.close()


def in_a_record_of_its_own(recorder: Recorder, commit: Commit, attempt: Any, guard: Callable[[], None]) -> Commit:
    """Record a commit as in a round of minutes, in which few shards end together."""
    return recorder._create([commit], guard)[0]


def test_a_driver_makes_few_requests_until_its_first_step(
    tiny_assets: Path, tmp_path: Path, api_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "starting_fleet", engines_here)
    monkeypatch.setattr(Recorder, "commit", in_a_record_of_its_own)
    rollout = {"num_rollout": 3, "rollout_batch_size": SHARDS, "shards_per_round": SHARDS}
    rollout |= {"n_samples_per_prompt": 2, "rollout_max_response_len": 4}
    config = tiny_config(tiny_assets, rollout=rollout, checkpoint={"save_interval": 1})
    requests, until_first_step = Requests(), Counter[str]()
    store_counts._count_local(requests, Counted)  # type: ignore[arg-type]

    def end_after_a_round(event: Event) -> None:
        if isinstance(event, StepStarted) and (event.iteration, event.step) == (1, Step.FILTER):
            requests.settled()
            raise Stopping

    def end_at_the_first_step(event: Event) -> None:
        if isinstance(event, StepStarted):
            until_first_step.update(requests.settled())
            raise Stopping

    with temporary_settings({PREFECT_API_URL: api_url}):
        with pytest.raises(Stopping):
            start(Counted(str(tmp_path)), "tiny", config, on_event=end_after_a_round)
        names = LocalStore(str(tmp_path)).list(layout.iteration("tiny", 1))
        assert sum(layout.parse_record(name) is not None for name in names) == 2 * SHARDS
        requests.made.clear()
        with pytest.raises(Stopping):
            start(Counted(str(tmp_path)), "tiny", on_event=end_at_the_first_step)
    assert 20 <= until_first_step.total() <= MOST, dict(until_first_step)
