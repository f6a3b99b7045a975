"""Admissions of a stream follow each other, one a number, whoever was interrupted or comes late."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.flows.streaming import _admit, admit_prompts
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.decisions import Quarantine
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.logs.admissions import claimed_numbers
from cairn.storage.store.errors import LeaseLost
from cairn.storage.store.store import Store
from cairn.storage.upkeep.collector import garbage
from cairn.storage.upkeep.verification import verify
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.quarantine import apply_requests, skipped_prompts
from cairn.tasks.durable.step import DurableStep
from cairn.tasks.streaming.opening import open_stream
from cairn.tasks.streaming.stream import Stream
from tests.flows.test_streaming import streaming
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, tiny_context


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    return streaming(tiny_assets, 2)


@pytest.fixture(scope="module")
def fleet(config: RunConfig) -> LocalFleet:
    return LocalFleet(config)


@pytest.fixture
def driver(config: RunConfig, fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Opens runs whose streams admit prompts and generate nothing."""
    monkeypatch.setattr(Stream, "begin", lambda stream: None)

    @contextmanager
    def opened(store: str) -> Iterator[RunContext]:
        with tiny_context(store, config, fleet=fleet) as (run, _), open_stream(run):
            yield run

    return opened


class Interrupted(DirectSteps):
    """Ends the driver when it is about to make an admission."""

    def call(self, step: DurableStep[Any], *args: Any, **kwargs: Any) -> Commit:
        raise KeyboardInterrupt


class Late:
    """A store that creates one file late: long after it was looked whether it may."""

    def __init__(self, store: Store, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proceed, self._waits = threading.Event(), threading.Event()
        create = store.create

        def blocked(at: str, data: bytes, guard: Callable[[], None] = lambda: None) -> bool:
            return create(at, data, (lambda: self._hold(guard)) if at == path else guard)

        monkeypatch.setattr(store, "create", blocked)

    def _hold(self, guard: Callable[[], None]) -> None:
        guard()
        self._waits.set()
        assert self.proceed.wait(60)

    def wait(self) -> None:
        assert self._waits.wait(60)


def pass_over(ledger: Ledger, prompt: int) -> None:
    ledger.decisions.record(lambda so_far: Quarantine(prompt=prompt, passed_over=True))


def admissions(ledger: Ledger) -> list[Commit]:
    """All of a run, by their numbers, which are one each; nothing is wrong with them, nor is a claim garbage."""
    commits = [commit for index in ledger.iterations() for commit in ledger.commits(index)]
    found = sorted((one for one in commits if one.step is Step.ADMIT), key=lambda one: int(str(one.values["number"])))
    assert [one.values["number"] for one in found] == list(range(len(found)))
    groups = list(chain(*(one.values["groups"] for one in found)))  # type: ignore[arg-type]
    assert groups == sorted(set(groups)), "in the order of the data, each once"
    assert not [finding.message for checked in verify(ledger) for finding in checked.findings]
    assert not [one.path for one in garbage(ledger)]
    return found


@pytest.mark.parametrize(("late", "kind"), [("claim", "local"), ("commit", "local"), ("commit", "s3")])
def test_what_an_old_driver_creates_late_takes_no_number_that_another_admission_has(
    late: str,
    kind: str,
    driver: Callable[[str], Any],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = str(tmp_path) if kind == "local" else request.getfixturevalue("s3_url")
    paths = {"claim": layout.admission("tiny", 1), "commit": layout.commit("tiny", 0, Step.ADMIT, "01")}
    with driver(url) as old:
        admit_prompts(old, DirectSteps(old), 0)
        blocked = Late(old.ledger.store, paths[late], monkeypatch)

        def refill() -> None:
            with suppress(LeaseLost):
                _admit(old, DirectSteps(old), 0, 1, 1)

        admitting = threading.Thread(target=refill)
        admitting.start()
        blocked.wait()
        with driver(url) as run:
            admit_prompts(run, DirectSteps(run), 1)
            blocked.proceed.set()
            admitting.join(60)
            _admit(run, DirectSteps(run), 0, 1, 1)
            admit_prompts(run, DirectSteps(run), 2)
            names = {"000000/admit.00", "000000/admit.01", "000001/admit.00", "000002/admit.00"}
            assert {one.name for one in admissions(run.ledger)} == names


def test_an_admission_that_was_claimed_and_not_made_is_made_first_as_it_was_claimed(
    driver: Callable[[str], Any], tmp_path: Path
) -> None:
    with driver(str(tmp_path)) as run:
        admit_prompts(run, DirectSteps(run), 0)
        with pytest.raises(KeyboardInterrupt):
            _admit(run, Interrupted(run), 0, 1, 1)
    for _ in range(2):  # the second finds what the first has made
        with driver(str(tmp_path)) as run:
            prompt = run.draw(0, 6, ()).rows[3].index
            pass_over(run.ledger, prompt)
            apply_requests(run, 1)
            admit_prompts(run, DirectSteps(run), 1)
            refill, other = admissions(run.ledger)[1:]
            assert (refill.name, len(refill.values["groups"]), refill.values["without"]) == ("000000/admit.01", 1, [])
            assert (other.name, other.values["without"]) == ("000001/admit.00", [prompt])
            stream = run.attached(Stream)
            assert stream is not None
            assert stream.newest_admission is not None
            assert stream.newest_admission.name == other.name


def test_what_people_decide_does_not_hold_for_an_iteration_whose_prompts_are_claimed(
    driver: Callable[[str], Any], tmp_path: Path
) -> None:
    with driver(str(tmp_path)) as run, pytest.raises(KeyboardInterrupt):
        admit_prompts(run, Interrupted(run), 0)
    with driver(str(tmp_path)) as run:
        pass_over(run.ledger, 5)
        apply_requests(run, 0)
        assert skipped_prompts(run.ledger, 0) == []
        apply_requests(run, 1)
        assert skipped_prompts(run.ledger, 1) == [5]


def test_a_ledger_whose_admissions_were_never_claimed_goes_on(driver: Callable[[str], Any], tmp_path: Path) -> None:
    with driver(str(tmp_path)) as run:
        for index in range(2):
            admit_prompts(run, DirectSteps(run), index)
    shutil.rmtree(tmp_path / layout.admissions("tiny"))  # as earlier versions of the code left it
    with driver(str(tmp_path)) as run:
        for index in range(1, 3):
            admit_prompts(run, DirectSteps(run), index)
        assert len(admissions(run.ledger)) == 3
        assert claimed_numbers(run.ledger.store, "tiny") == [2]
