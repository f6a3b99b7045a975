"""Whether a machine gives the same bits twice is tried once, recorded, and leaves no trace in the run."""

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.errors import EngineDied
from cairn.flows.iteration import iteration
from cairn.flows.reading.views import run_status
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.store import canonical
from cairn.storage.store.errors import LeaseLost
from cairn.storage.upkeep.collector import garbage
from cairn.storage.upkeep.self_tests import find_self_test
from cairn.tasks.trainer.self_test import fingerprint, self_test_once
from tests.local_fleet import LocalFleet
from tests.storage.builders import ENVIRONMENT
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

PPO = {"advantage_estimator": "ppo"}
"""An actor and a critic."""


class OtherBitsEveryTime(LocalFleet):
    """Real engines on a machine whose sums are not the same twice."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        actor, passes = self.training.engine._learners["actor"], itertools.count(1)  # type: ignore[attr-defined]
        accumulate = actor.accumulate_gradients

        def accumulate_otherwise(*step: Any) -> Any:
            metrics = accumulate(*step)
            next(iter(actor.gradients())).mul_(1 + 1e-6 * next(passes))
            return metrics

        actor.accumulate_gradients = accumulate_otherwise


def test_a_machine_that_gives_the_same_bits_is_tested_once_and_the_run_is_as_without(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny_assets, rollout={"num_rollout": 2}, algorithm=PPO)
    digests: list[list[str | None]] = []
    for name in ("tested", "untested"):
        fleet = LocalFleet(config)
        with tiny_context(str(tmp_path / name), config, fleet=fleet) as (run, events):
            iteration(run, DirectSteps(run), 0)
            if name == "tested":
                before = fleet.training.engine.state_digest()
                with monkeypatch.context() as patch:
                    for costly in ("copy_state", "load", "restart", "train"):
                        patch.setattr(fleet.training, costly, Mock(side_effect=AssertionError(costly)))
                    for _ in range(2):
                        self_test_once(run, run.committed(0, Step.TRAIN))
                fleet.training.engine._move_to(fleet.training.engine._version)  # type: ignore[attr-defined]
                assert fleet.training.engine.state_digest() == before
                key = fingerprint(config, run.ledger.terms.inputs.get("model"), fleet.training.environment)
                found = find_self_test(run.ledger.store, key)
                assert found is not None
                assert found.agrees
                assert found.digests[0] == found.digests[1]
                said = [getattr(event, "text", "") for event in events]
                assert sum("computed the same bits twice" in text for text in said) == 1
            iteration(run, DirectSteps(run), 1)
            digests.append(train_digests(run, range(2)))
    assert digests[0] == digests[1]
    store = open_store(str(tmp_path / "tested"))
    assert run_status(store, "tiny").same_bits is True
    assert run_status(open_store(str(tmp_path / "untested")), "tiny").same_bits is None
    assert list(garbage(Ledger.open(store, "tiny"))) == []


def test_a_result_of_a_version_that_compared_whole_updates_is_read(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    result = {
        "schema_version": 1,
        "fingerprint": "f",
        "environment": ENVIRONMENT.model_dump(mode="json"),
        "agrees": True,
        "state_digests": ["a", "a"],
        "run": "run",
        "iteration": 0,
        "seconds": 1.0,
        "tested_at": 1.0,
    }
    store.create(layout.self_test("f"), canonical.seal(result), lambda: None)
    found = find_self_test(store, "f")
    assert found is not None
    assert found.digests == ("a", "a")


def test_a_machine_that_gives_other_bits_is_told_with_the_way_out_and_the_run_goes_on(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_assets)
    with tiny_context(str(tmp_path), config, fleet=OtherBitsEveryTime(config)) as (run, events):
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

    def die(*_: Any, **__: Any) -> None:
        raise EngineDied("training: the actor's process is gone")

    with tiny_context(str(tmp_path / "died"), config, fleet=fleet) as (run, events):
        iteration(run, DirectSteps(run), 0)
        with monkeypatch.context() as patch:
            patch.setattr(fleet.training.engine, "gradient_digests", die)
            self_test_once(run, run.committed(0, Step.TRAIN))
        assert any("the next driver repeats it" in getattr(event, "text", "") for event in events)
        iteration(run, DirectSteps(run), 1)
        after = train_digests(run, range(2))
    with tiny_context(str(tmp_path / "undisturbed"), config) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
        assert train_digests(run, range(2)) == after


def test_no_self_test_begins_while_the_driver_ends(tiny_assets: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_assets)
    fleet = LocalFleet(config)
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        iteration(run, DirectSteps(run), 0)
        run.stopping.set()
        self_test_once(run, run.committed(0, Step.TRAIN))
        assert fleet.training.updates == 1


def test_a_driver_that_has_lost_the_run_records_no_self_test(tiny_assets: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_assets)
    with tiny_context(str(tmp_path), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        Ledger.open(run.ledger.store, "tiny").acquire(takeover=True)
        with pytest.raises(LeaseLost):
            self_test_once(run, run.committed(0, Step.TRAIN))
        assert not run.ledger.store.list("self-tests")
