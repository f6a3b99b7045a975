"""A run that goes on in another layout: what the ledger records, and what is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.errors import ConfigError
from cairn.configs.schema.run import RunConfig
from cairn.flows.driver import session
from cairn.flows.driver.session import open_run
from cairn.flows.driver.trust import recorded_config
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.store.errors import RunDiffers
from cairn.storage.upkeep.verification import verify
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, Events, killed_driver, tiny_config, tiny_context

NEW = ("rollout.num_engines=1", "training.max_tokens_per_gpu=96")


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in this process."""

    @contextmanager
    def local_fleet(config: RunConfig, *_: Any, **options: Any) -> Iterator[Any]:
        yield partial(LocalFleet, config)

    monkeypatch.setattr(session, "starting_fleet", local_fleet)


def tiny(assets: Path, interval: int | None = 1) -> RunConfig:
    return tiny_config(assets, rollout={"num_rollout": 3, "num_engines": 2}, checkpoint={"save_interval": interval})


def go_on(store: str, *relayout: str, first: int) -> Events:
    events = Events()
    with open_run(open_store(store), "tiny", None, takeover=True, relayout=relayout, emit=events.append) as run:  # type: ignore[arg-type]
        fleet = run.fleet
        run._fleet = lambda: fleet
        for index in range(first, run.config.rollout.num_rollout):
            iteration(run, DirectSteps(run), index)
    return events


def test_the_ledger_records_the_new_layout_and_earlier_commits_stay_valid(tiny_assets: Path, tmp_path: Path) -> None:
    store, config = str(tmp_path), tiny(tiny_assets)
    with tiny_context(store, config) as (run, _):
        iteration(run, DirectSteps(run), 0)
    events = go_on(store, *NEW, first=0)
    assert any("rollout.num_engines was 2, is 1" in str(event) for event in events)
    ledger = Ledger.open(open_store(store), "tiny")
    (upgrade,) = ledger.upgrades
    assert upgrade.config["rollout"]["num_engines"] == 1  # type: ignore[index, call-overload]
    assert {commit.terms for commit in ledger.commits(0)} == {0}
    assert {commit.terms for index in (1, 2) for commit in ledger.commits(index)} == {1}
    assert not [finding for one in verify(ledger) for finding in one.findings]
    assert recorded_config(ledger).training.max_tokens_per_gpu == 96
    go_on(store, first=2)  # nothing is left to do, and the new layout is that of the run
    assert len(Ledger.open(open_store(store), "tiny").upgrades) == 1
    with pytest.raises(RunDiffers, match=r"rollout\.num_engines is 1 in the ledger, 2 now"):
        Ledger.open(open_store(store), "tiny", config)


def test_shards_of_a_round_that_was_cut_for_more_engines_are_kept(tiny_assets: Path, tmp_path: Path) -> None:
    store, config = str(tmp_path), tiny(tiny_assets)
    killed_driver(store, config, Step.REWARD)
    kept = [commit for commit in Ledger.open(open_store(store), "tiny").commits(1) if commit.step is Step.ROLLOUT]
    assert kept
    events = go_on(store, "rollout.num_engines=1", first=1)
    assert {commit.name for commit in kept} <= set(events.adopted())


def test_weights_that_are_in_no_checkpoint_are_not_replayed_in_another_layout(
    tiny_assets: Path, tmp_path: Path
) -> None:
    store, config = str(tmp_path), tiny(tiny_assets, interval=None)
    with tiny_context(store, config) as (run, _):
        iteration(run, DirectSteps(run), 0)
    with pytest.raises(ConfigError, match=r"weights of iteration 0 from a checkpoint .* but it has none"):
        go_on(store, *NEW, first=0)
    go_on(store, "rollout.num_engines=1", first=0)  # its weights do not depend on that


def test_other_options_are_refused(tiny_assets: Path, tmp_path: Path) -> None:
    store, config = str(tmp_path), tiny(tiny_assets)
    with tiny_context(store, config) as (run, _):
        iteration(run, DirectSteps(run), 0)
    with pytest.raises(ConfigError, match=r"--set training\.lr: only the layout .* `cairn fork tiny@N"):
        go_on(store, "training.lr=0.5", first=0)
    assert not Ledger.open(open_store(store), "tiny").upgrades
