"""A run whose weights replay does not bring back stops, or goes on as a fork at its newest checkpoint."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.configs.loader import from_manifest
from cairn.flows.driver.preemption import Ending
from cairn.flows.driver.trust import recorded_config
from cairn.flows.history.fork import fork
from cairn.flows.iteration import iteration
from cairn.flows.reading.views import run_status
from cairn.flows.train import fork_after_divergence, opened
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import list_runs
from cairn.storage.opening import open_store
from cairn.storage.store.errors import LeaseLost
from cairn.storage.upkeep.retention import newest_checkpoint
from cairn.tasks.batch.source import SnapshotBatch
from cairn.tasks.durable.events import Message
from cairn.tasks.trainer.recovery import ReplayDiverged, restore_trainer
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

DIVERGES = {"on_divergence": "fork"}


class OtherBitsAfterARestart(LocalFleet):
    """Real engines on a machine whose arithmetic is not the same after the training engine was restarted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        restart, training = self.training.restart, self.training

        def restart_elsewhere() -> None:
            restart()
            train = training.engine.train

            def train_otherwise(source: SnapshotBatch, **options: Any) -> Any:
                batch = source.reader().whole()
                assert batch.advantages is not None
                return train(replace(batch, advantages=[a * np.float32(1.001) for a in batch.advantages]), **options)

            training.engine.train = train_otherwise  # type: ignore[method-assign]

        self.training.restart = restart_elsewhere  # type: ignore[method-assign]


def diverged(tiny_assets: Path, store: Path, **sections: dict[str, object]) -> ReplayDiverged:
    """Three iterations, and a fourth whose driver finds other bits when it restores the weights of the third."""
    config = tiny_config(tiny_assets, rollout={"num_rollout": 4, "rollout_batch_size": 4}, **sections)
    with tiny_context(str(store), config) as (run, _):
        for index in range(3):
            iteration(run, DirectSteps(run), index)
    fleet = OtherBitsAfterARestart(config)
    fleet.training.restart()
    with (
        tiny_context(str(store), config, fleet=fleet) as (run, _),
        pytest.raises(ReplayDiverged, match="/train: expected state digest") as raised,
    ):
        restore_trainer(run, run.committed(2, Step.TRAIN))
    return raised.value


def test_by_default_the_run_stops_with_both_digests(tiny_assets: Path, tmp_path: Path) -> None:
    error = diverged(tiny_assets, tmp_path, checkpoint={"save_interval": 2})
    with pytest.raises(ReplayDiverged) as raised:
        fork_after_divergence(open_store(str(tmp_path)), "tiny", error, lambda event: None)
    assert raised.value is error


def test_a_fork_goes_on_from_the_newest_checkpoint_and_says_why(tiny_assets: Path, tmp_path: Path) -> None:
    error = diverged(tiny_assets, tmp_path, checkpoint={"save_interval": 2}, recovery=DIVERGES)
    messages: list[Message] = []
    name = fork_after_divergence(open_store(str(tmp_path)), "tiny", error, messages.append)  # type: ignore[arg-type]
    assert name == "tiny-from-000001"
    assert [message.text for message in messages] == [
        str(error),
        "Run tiny is not changed; its fork tiny-from-000001 continues from iteration 1",
    ]
    store = open_store(str(tmp_path))
    parent = run_status(store, name).parent
    assert parent is not None
    assert (parent.run, parent.iteration, parent.reason) == ("tiny", 1, str(error))
    assert Ledger.open(store, "tiny").find(2, Step.TRAIN) is not None
    # Asked again, by a driver that was killed before the fork began, it is the same one.
    assert fork_after_divergence(open_store(str(tmp_path)), "tiny", error, lambda event: None) == name
    fork = Ledger.open(store, name)
    assert newest_checkpoint(fork, 1) == Ledger.open(store, "tiny").find(1, Step.CHECKPOINT)
    config = recorded_config(fork)
    with tiny_context(str(tmp_path), config, name, OtherBitsAfterARestart(config)) as (run, _):
        for index in range(2, 4):
            iteration(run, DirectSteps(run), index)
        assert run.committed(3, Step.TRAIN).weight_version_out == 4


def test_without_a_checkpoint_there_is_nothing_to_fork_at(tiny_assets: Path, tmp_path: Path) -> None:
    error = diverged(tiny_assets, tmp_path, recovery=DIVERGES)
    with pytest.raises(ReplayDiverged, match=r"expected state digest .* set checkpoint\.save_interval"):
        fork_after_divergence(open_store(str(tmp_path)), "tiny", error, lambda event: None)


def test_a_checkpoint_that_diverges_itself_is_forked_no_further(tiny_assets: Path, tmp_path: Path) -> None:
    error = diverged(tiny_assets, tmp_path, checkpoint={"save_interval": 2}, recovery=DIVERGES)
    name = fork_after_divergence(open_store(str(tmp_path)), "tiny", error, lambda event: None)
    with pytest.raises(ReplayDiverged, match="the checkpoint itself diverges"):
        fork_after_divergence(open_store(str(tmp_path)), name, error, lambda event: None)
    assert set(list_runs(open_store(str(tmp_path)))) == {"tiny", name}


def test_iterations_of_a_parent_are_not_done_again_with_the_options_of_its_fork(
    tiny_assets: Path, tmp_path: Path
) -> None:
    error = diverged(tiny_assets, tmp_path, checkpoint={"save_interval": 2}, recovery=DIVERGES)
    store = open_store(str(tmp_path))
    fork(Ledger.open(store, "tiny"), 2, "hotter", ["training.lr=0.1"])
    with pytest.raises(ReplayDiverged, match="of iteration 1, is older than the fork hotter"):
        fork_after_divergence(open_store(str(tmp_path)), "hotter", error, lambda event: None)
    assert set(list_runs(store)) == {"tiny", "hotter"}


@pytest.mark.parametrize("restores", [True, False])
def test_a_driver_that_has_lost_the_run_forks_nothing(
    restores: bool, tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def without_engines(*args: Any) -> Iterator[None]:
        yield

    def diverge_too_late(*args: Any) -> None:
        Ledger.open(open_store(str(tmp_path)), "tiny").acquire(takeover=True)
        raise ReplayDiverged("000001/train: other bits")

    def drive_too_long() -> None:
        config = tiny_config(tiny_assets, recovery=DIVERGES)
        with opened(open_store(str(tmp_path)), "tiny", config, False, lambda event: None, Ending()):
            diverge_too_late()

    monkeypatch.setattr("cairn.flows.driver.session.starting_fleet", without_engines)
    monkeypatch.setattr("cairn.flows.driver.session.needs_restore_point", lambda ledger, config: restores)
    monkeypatch.setattr("cairn.flows.driver.session.make_restore_point", diverge_too_late)
    with pytest.raises(LeaseLost):
        drive_too_long()


@pytest.mark.parametrize("on_divergence", ["stop", "fork"])
def test_what_the_user_alone_may_set_hides_no_divergence_and_goes_to_the_fork(
    on_divergence: str, tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"checkpoint": {"save_interval": 2}, "recovery": {"on_divergence": on_divergence}}
    error = diverged(tiny_assets, tmp_path, **recipe)
    user_recipe = from_manifest(Ledger.open(open_store(str(tmp_path)), "tiny").manifest.config)
    monkeypatch.delenv("PYTHONPATH")  # so the grader is where no store may name code
    with pytest.raises(ReplayDiverged, match=re.escape(str(error))):
        fork_after_divergence(open_store(str(tmp_path)), "tiny", error, lambda event: None)
    if on_divergence == "fork":
        name = fork_after_divergence(open_store(str(tmp_path)), "tiny", error, lambda event: None, user_recipe)
        assert from_manifest(Ledger.open(open_store(str(tmp_path)), name).manifest.config) == user_recipe
