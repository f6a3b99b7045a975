"""What becomes of a run whose publication is lost, or is not what was published: with a real fleet."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import Fleet
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.durable.events import Message
from cairn.tasks.trainer.sync import publish
from tests.tiny_run import DirectSteps, tiny_config, tiny_context
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    whole = {"update_weight_buffer_size": 2**24}  # in the object store, and not with the driver
    return tiny_config(tiny_assets, rollout={"num_rollout": 2}, checkpoint={"save_interval": 1}, fleet=whole)


@pytest.fixture(scope="module")
def fleet(config: RunConfig, ray_cluster: Cluster) -> Iterator[Fleet]:
    with Fleet.start(config, name="publications", total_steps=2) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def undisturbed(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> str:
    with tiny_context(str(tmp_path_factory.mktemp("undisturbed")), config) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
        return str(run.committed(1, Step.TRAIN).state_digest)


class Holder:
    """A process with something in the object store."""

    def put(self) -> "list[ray.ObjectRef[bytes]]":
        return [ray.put(bytes(2**20))]


def lose(fleet: Fleet) -> None:
    """Ray has lost what was published as version 1."""
    holder: Any = ray.remote(num_cpus=0)(Holder).remote()
    lost = ray.get(holder.put.remote())
    ray.kill(holder)
    wait_for(lambda: not ray.wait(lost, timeout=0)[0], 30)
    publication, (_, sent) = fleet.weights._find(1)
    fleet.weights._stored[1] = (publication, (lost, sent))


def exchange(fleet: Fleet) -> None:
    """Other weights lie where version 1 was published."""
    fleet.weights._stored[1] = (fleet.weights._find(1)[0], fleet.weights._stored[0][1])


@pytest.mark.proof
@pytest.mark.parametrize("spoil", [lose, pytest.param(exchange, marks=pytest.mark.slow)])
def test_it_is_published_again_from_the_newest_checkpoint(
    spoil: Callable[[Fleet], None], config: RunConfig, fleet: Fleet, undisturbed: str, tmp_path: Path
) -> None:
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, events):  # type: ignore[arg-type]
        publish(run, None)
        iteration(run, DirectSteps(run), 0)
        spoil(fleet)
        os.kill(fleet.training.health()["pid"], signal.SIGKILL)
        iteration(run, DirectSteps(run), 1)
        assert run.committed(1, Step.TRAIN).state_digest == undisturbed
    restored = "Restoring weight version 1 from the checkpoint of iteration 0; 0 committed step(s) to replay"
    assert restored in [event.text for event in events if isinstance(event, Message)]
