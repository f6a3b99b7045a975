"""Two drivers on one cluster: the one that lost its run to the other destroys nothing, and is obeyed by nobody."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group_table, remove_placement_group

from engines.cluster import Cluster
from engines.errors import Superseded
from engines.fencing import Tenure
from engines.fleet import Fleet
from engines.types import Completion, GenerateRequest, SamplingParams
from storage.errors import LeaseLost
from tests.engines.training.builders import make_batch, model_folder
from tests.ray_fixtures import fleet_config

ASKED = [GenerateRequest(index, [5 + index, 6, 7], (1, 2), SamplingParams(8)) for index in range(3)]


class Run:
    """Whose the fleet is, as the ledger says, and its drivers' fleets."""

    def __init__(self, model: Path) -> None:
        self.config = fleet_config(model)
        self.epoch = 0

    def take_over(self) -> Fleet:
        """The fleet of the next driver."""
        self.epoch += 1
        epoch = self.epoch

        def check() -> None:
            if epoch != self.epoch:
                raise LeaseLost(f"epoch {self.epoch} is the newest")
            self.after_look(epoch)

        return Fleet.start(self.config, name="succession", total_steps=100, tenure=Tenure(epoch, check))

    def after_look(self, epoch: int) -> None:
        """Called when the driver of that epoch has found itself to be the newest."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, ray_cluster: Cluster) -> Iterator[Run]:
    """On the session's cluster, with actors and groups that outlive a driver as on one that was joined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "joined", property(lambda cluster: True))
        run = Run(model_folder(tmp_path_factory.mktemp("model")))
        yield run
        run.take_over().close()
        assert not groups()


def groups() -> list[str]:
    """Names of the placement groups that are there."""
    table = placement_group_table().values()
    return sorted(
        entry["name"].split(":")[2]
        for entry in table
        if entry["name"].startswith("cairn:succession:") and entry["state"] == "CREATED"
    )


def works(fleet: Fleet) -> list[int]:
    """Train, sync and generate with the fleet; the processes that did it."""
    version = fleet.training.position().weight_version
    fleet.training.train(make_batch(), num_steps=1, expected_version=version, input_digest=str(version))
    assert fleet.sync_weights() == [version + 1]
    completions: list[Completion] = [one for part in fleet.rollout[0].generate(ASKED) for one in part]
    assert len(completions) == 6
    return [engine.health()["pid"] for engine in fleet.engines]


def test_a_superseded_driver_is_refused_by_every_engine_and_leaves_the_fleet_to_its_successor(run: Run) -> None:
    old = run.take_over()
    pids = works(old)
    new = run.take_over()
    assert works(new) == pids, "it has adopted them"

    with pytest.raises(Superseded, match="this driver's epoch is 1, and the engine belongs to the driver of epoch 2"):
        old.training.train(make_batch(), num_steps=1, expected_version=2, input_digest="late")
    with pytest.raises(Superseded):
        list(old.rollout[0].generate(ASKED))
    for engine in old.engines:
        with pytest.raises(Superseded):
            engine.ensure_alive()
        with pytest.raises(LeaseLost):
            engine.restart()
    old.close()
    assert works(new) == pids


def test_a_driver_that_loses_its_run_while_it_gives_its_fleet_back_ends_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, epoch = run.take_over(), run.epoch
    pids = works(old)
    successors: list[Fleet] = []

    def suspend(looking: int) -> None:
        """Right after it has found its lease still its own, until another driver has its engines."""
        if looking == epoch:
            successors.append(run.take_over())

    monkeypatch.setattr(run, "after_look", suspend)
    old.close()
    (new,) = successors
    assert works(new) == pids
    assert groups() == ["rollout", "training"]


def test_engines_whose_placement_group_is_gone_get_another(run: Run) -> None:
    fleet = run.take_over()
    pids = works(fleet)
    for entry in placement_group_table().values():
        if entry["name"].startswith("cairn:succession:") and entry["state"] == "CREATED":
            remove_placement_group(ray.util.get_placement_group(entry["name"]))
    fleet.ensure_rollout_alive()
    fleet.training.ensure_alive()
    assert not set(works(fleet)) & set(pids)
    assert groups() == ["rollout", "training"]
    again = works(fleet)
    assert works(run.take_over()) == again, "the next driver takes the new groups over"


@pytest.mark.slow
def test_the_first_driver_of_a_new_run_has_engines_of_its_own_where_a_deleted_run_of_its_name_left_some(
    run: Run,
) -> None:
    pids = works(run.take_over())
    run.epoch = 0
    assert not set(works(run.take_over())) & set(pids)
