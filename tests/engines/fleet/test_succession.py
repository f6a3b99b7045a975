"""Two drivers on one cluster: the one that lost its run to the other destroys nothing, and is obeyed by nobody."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
import ray
from ray.util.placement_group import placement_group_table, remove_placement_group

from cairn.engines.fleet import placement
from cairn.engines.fleet.actors import EngineActor, RolloutActor
from cairn.engines.fleet.calls import Deadline, result
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fencing import Claim, Tenure
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.fleet.placement import Placement
from cairn.engines.fleet.roles import ActorRole, Bundle
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.types.errors import EngineDied, Superseded
from cairn.engines.types.keeping import SampleSource
from cairn.engines.types.types import Completion, SamplingParams
from cairn.storage.ledger.leases import Lease, Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.records import CodeVersion
from cairn.storage.store.errors import LeaseLost
from tests.engines.agents.episodes.test_samples import all_of
from tests.engines.fleet.test_episodes import PARAMS, asked, users
from tests.engines.training.builders import make_batch, model_folder
from tests.fleets import sync
from tests.ray_fixtures import NUM_CPUS, fleet_config
from tests.requests import group

pytestmark = pytest.mark.proof

REQUESTED = [one for index in range(3) for one in group(index, [5 + index, 6, 7], (1, 2), SamplingParams(8))]


class Run:
    """A run in a store, and its drivers' fleets."""

    def __init__(self, model: Path, folder: Path) -> None:
        own = {"custom_generate_function_path": "tests.engines.agents.episodes.agents.turns", "num_episode_workers": 2}
        self.config = fleet_config(model, rollout=own)
        self.folder = folder

    def take_over(self) -> Fleet:
        """The fleet of the next driver."""
        ledger = Ledger.create(open_store(str(self.folder)), "run-1", {})
        self.lease = lease = ledger.acquire(takeover=True)

        def check() -> None:
            lease.check()
            self.after_look(lease)

        tenure = Tenure(Claim(ledger.manifest.identity, lease.epoch), check)
        return Fleet.start(self.config, name="succession", total_steps=100, tenure=tenure)

    def after_look(self, lease: Lease) -> None:
        """Called when the driver with that lease has found itself to be the newest."""

    def delete(self) -> None:
        """As `cairn delete` does when a holder on another machine has been silent."""
        with suppress(FileNotFoundError):
            (self.folder / "runs/run-1").rename(self.folder / f"deleted-{uuid4().hex}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, ray_cluster: Cluster) -> Iterator[Run]:
    """On the session's cluster, with actors and groups that outlive a driver as on one that was joined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "joined", property(lambda cluster: True))
        run = Run(model_folder(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("store"))
        yield run
        run.take_over().close()
        run.lease.release(Outcome.STOPPED)
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
    assert sync(fleet) == [version + 1]
    completions: list[Completion] = [one for part in fleet.rollout[0].generate(REQUESTED) for one in part]
    assert len(completions) == 6
    assert len(all_of(fleet.rollout[0].generate_samples(asked(8), PARAMS, users("turns")))) == 8
    return [engine.health()["pid"] for engine in fleet.engines]


def test_a_superseded_driver_is_refused_by_every_engine_and_leaves_the_fleet_to_its_successor(run: Run) -> None:
    old = run.take_over()
    pids = works(old)
    new = run.take_over()
    assert works(new) == pids, "it has adopted them"

    with pytest.raises(Superseded, match="this driver's epoch is 1, and the engine belongs to the driver of epoch 2"):
        old.training.train(make_batch(), num_steps=1, expected_version=2, input_digest="late")
    with pytest.raises(Superseded):
        list(old.rollout[0].generate(REQUESTED))
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
    old, its_lease = run.take_over(), run.lease
    pids = works(old)
    successors: list[Fleet] = []

    def suspend(looking: Lease) -> None:
        """Right after it has found its lease still its own, until another driver has its engines."""
        if looking is its_lease:
            successors.append(run.take_over())

    monkeypatch.setattr(run, "after_look", suspend)
    old.close()
    (new,) = successors
    assert works(new) == pids
    assert groups() == ["episodes", "rollout", "training"]


def test_a_driver_that_loses_its_run_while_it_waits_for_room_leaves_its_groups_to_its_successor(
    run: Run, ray_cluster: Cluster
) -> None:
    def pending() -> list[str]:
        table = placement_group_table().values()
        return [e["name"] for e in table if e["name"].startswith("cairn:waits:") and e["state"] == "PENDING"]

    def look() -> None:
        if pending():
            raise LeaseLost("taken over")

    role = ActorRole(
        "rollout", RolloutActor, (Bundle(NUM_CPUS), Bundle(NUM_CPUS)), 1, "digest", "fleet.num_cpus_per_engine"
    )
    with pytest.raises(LeaseLost):
        Placement("waits", [role], ray_cluster, Deadline(1.0), Tenure(Claim("run", 1), look))
    (name,) = pending()
    remove_placement_group(ray.util.get_placement_group(name))


class Deaf:
    """A keeper that generates for longer than a test lasts, and hears no abort."""

    def generate(self, engine: SampleSource) -> Iterator[int]:
        yield 1
        time.sleep(600)

    def finish(self) -> None: ...

    def close(self) -> None: ...


def test_an_engine_that_is_busy_for_a_replaced_driver_and_does_not_stop_is_replaced(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = run.take_over()
    pid = old.rollout[0].health()["pid"]
    keeper = old.rollout[0].keep(Deaf)
    assert next(keeper) == 1
    monkeypatch.setattr(RolloutHandle, "patience", lambda engine: Deadline(10))
    new = run.take_over()
    assert new.rollout[0].health()["pid"] != pid
    with pytest.raises(EngineDied):
        next(keeper)


def test_engines_whose_placement_group_is_gone_get_another(run: Run) -> None:
    fleet = run.take_over()
    pids = works(fleet)
    for entry in placement_group_table().values():
        if entry["name"].startswith("cairn:succession:") and entry["state"] == "CREATED":
            remove_placement_group(ray.util.get_placement_group(entry["name"]))
    for engine in fleet.engines:
        engine.ensure_alive()
    assert not set(works(fleet)) & set(pids)
    assert groups() == ["episodes", "rollout", "training"]
    repeated = works(fleet)
    assert works(run.take_over()) == repeated, "the next driver takes the new groups over"


def test_a_driver_of_another_version_of_the_code_makes_engines_of_its_own(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = {engine.health()["pid"] for engine in run.take_over().engines}
    monkeypatch.setattr(placement, "code_version", lambda: CodeVersion(package="9.9"))
    assert pids.isdisjoint(engine.health()["pid"] for engine in run.take_over().engines)


def test_a_driver_of_a_run_that_was_deleted_is_refused_by_the_engines_of_the_next_run_of_that_name(run: Run) -> None:
    run.delete()
    old = run.take_over()
    pids = works(old)
    run.delete()
    new, its_lease = run.take_over(), run.lease
    assert its_lease.epoch == 1, "as the old driver's"
    others = works(new)
    assert not set(pids) & set(others), "it has adopted none"

    for engine in old.engines:
        with pytest.raises(EngineDied):
            engine.health()
        with pytest.raises(LeaseLost):
            engine.restart()
    for actor in (actor for engine in old.engines for actor in engine._actors):
        assert actor.find(), "by its name, as a driver that replaces it does"
        for method in (EngineActor.health, EngineActor.end):
            with pytest.raises(Superseded, match="another run of that name"):
                result(actor.callee().call(method), Deadline(60), method.__name__)
    old.close()
    assert works(new) == others
