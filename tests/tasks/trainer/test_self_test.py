"""Whether a machine gives the same bits twice is tried once, recorded, and leaves no trace in the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.engines.types.errors import EngineDied
from cairn.flows.driver.preemption import save
from cairn.flows.iteration import iteration
from cairn.flows.reading.views import run_status
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.store.errors import LeaseLost, NoSpace
from cairn.storage.upkeep.collector import garbage
from cairn.storage.upkeep.self_tests import find_self_test
from cairn.tasks.trainer.self_test import fingerprint, self_test_once
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests


class OtherBitsAfterARestart(LocalFleet):
    """Real engines on a machine whose arithmetic is not the same after the training engine was restarted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        restart, training = self.training.restart, self.training

        def restart_elsewhere() -> None:
            restart()
            train = training.engine.train

            def train_otherwise(batch: Any, **options: Any) -> Any:
                return train(replace(batch, advantages=[a * np.float32(1.001) for a in batch.advantages]), **options)

            training.engine.train = train_otherwise  # type: ignore[method-assign]

        self.training.restart = restart_elsewhere  # type: ignore[method-assign]


@pytest.mark.parametrize("save_interval", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_a_machine_that_gives_the_same_bits_is_tested_once_and_the_run_is_as_without(
    tiny_assets: Path, tmp_path: Path, save_interval: int | None
) -> None:
    config = tiny_config(tiny_assets, checkpoint={"save_interval": save_interval})
    digests: list[list[str | None]] = []
    for name in ("tested", "untested"):
        fleet = LocalFleet(config)
        with tiny_context(str(tmp_path / name), config, fleet=fleet) as (run, events):
            iteration(run, DirectSteps(run), 0)
            if name == "tested":
                before = fleet.training.engine.state_digest()
                self_test_once(run, run.committed(0, Step.TRAIN))
                assert fleet.training.engine.state_digest() == before
                updates = fleet.training.updates
                self_test_once(run, run.committed(0, Step.TRAIN))
                assert fleet.training.updates == updates == 3
                key = fingerprint(config, run.ledger.terms.inputs.get("model"), fleet.training.environment)
                found = find_self_test(run.ledger.store, key)
                assert found is not None
                assert found.agrees
                assert found.state_digests[0] == found.state_digests[1] != before
                assert any("computed the same bits twice" in getattr(event, "text", "") for event in events)
            iteration(run, DirectSteps(run), 1)
            digests.append(train_digests(run, range(2)))
    assert digests[0] == digests[1]
    store = open_store(str(tmp_path / "tested"))
    assert run_status(store, "tiny").same_bits is True
    assert run_status(open_store(str(tmp_path / "untested")), "tiny").same_bits is None
    assert list(garbage(Ledger.open(store, "tiny"))) == []


def test_a_machine_that_gives_other_bits_is_told_with_the_way_out_and_the_run_goes_on(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_assets)
    with tiny_context(str(tmp_path), config, fleet=OtherBitsAfterARestart(config)) as (run, events):
        iteration(run, DirectSteps(run), 0)
        trained = run.committed(0, Step.TRAIN)
        self_test_once(run, trained)
        (warning,) = [event.text for event in events if getattr(event, "level", "") == "warning"]
        assert "computed other bits the second time" in warning
        assert "recovery.on_divergence" in warning
        assert run.fleet.training.position().state_digest == trained.state_digest
    assert run_status(open_store(str(tmp_path)), "tiny").same_bits is False


def test_an_engine_that_dies_in_the_test_costs_the_test_alone(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny_assets)
    fleet = LocalFleet(config)

    def die() -> None:
        raise EngineDied("training: the actor's process is gone")

    with tiny_context(str(tmp_path / "died"), config, fleet=fleet) as (run, events):
        iteration(run, DirectSteps(run), 0)
        with monkeypatch.context() as patch:
            patch.setattr(fleet.training, "restart", die)
            self_test_once(run, run.committed(0, Step.TRAIN))
        assert any("the next driver repeats it" in getattr(event, "text", "") for event in events)
        iteration(run, DirectSteps(run), 1)
        after = train_digests(run, range(2))
    with tiny_context(str(tmp_path / "undisturbed"), config) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
        assert train_digests(run, range(2)) == after


def test_a_store_that_is_full_costs_the_test_alone_and_gets_its_space_back(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny_assets)
    fleet = LocalFleet(config)
    save = fleet.training.save

    def save_until_the_disk_is_full(store: str, folder: str) -> None:
        assert save(store, folder)
        raise NoSpace("no space is left")

    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, events):
        iteration(run, DirectSteps(run), 0)
        with monkeypatch.context() as patch:
            patch.setattr(fleet.training, "save", save_until_the_disk_is_full)
            self_test_once(run, run.committed(0, Step.TRAIN))
        assert any("interrupted" in getattr(event, "text", "") for event in events)
        assert not run.ledger.store.find("runs/tiny/iterations/000000/checkpoint")
        iteration(run, DirectSteps(run), 1)


def test_no_self_test_begins_while_the_driver_ends(tiny_assets: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_assets)
    fleet = LocalFleet(config)
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        iteration(run, DirectSteps(run), 0)
        run.stopping.set()
        self_test_once(run, run.committed(0, Step.TRAIN))
        assert fleet.training.updates == 1


@pytest.mark.parametrize(("meanwhile", "updates"), [("save", 0), ("train", 1), ("restart", 1)])
def test_a_self_test_that_was_begun_ends_with_the_engine_call_in_which_the_driver_is_told_to_end(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str, updates: int
) -> None:
    config = tiny_config(tiny_assets)
    fleet = LocalFleet(config)
    call = getattr(fleet.training, meanwhile)
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, events):
        iteration(run, DirectSteps(run), 0)
        trained = run.committed(0, Step.TRAIN)
        done = fleet.training.updates

        def interrupt(*args: Any, **options: Any) -> Any:
            run.stopping.set()
            return call(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(fleet.training, meanwhile, interrupt)
            self_test_once(run, trained)
        assert fleet.training.updates == done + updates
        assert fleet.training.position().state_digest == trained.state_digest, "which the driver can save"
        assert save(run) is not None
        assert any("this driver must stop" in getattr(event, "text", "") for event in events)
        assert not run.ledger.store.list("self-tests")
    assert list(garbage(Ledger.open(open_store(str(tmp_path)), "tiny"))) == []


def test_a_driver_that_has_lost_the_run_records_no_self_test(tiny_assets: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_assets)
    with tiny_context(str(tmp_path), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        Ledger.open(run.ledger.store, "tiny").acquire(takeover=True)
        with pytest.raises(LeaseLost):
            self_test_once(run, run.committed(0, Step.TRAIN))
        assert not run.ledger.store.list("self-tests")
