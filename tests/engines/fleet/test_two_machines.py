"""An engine of two tensor-parallel ranks, each in a process under an actor of its own, as on two machines."""

from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import cairn.engines.rollout.sglang.kind
from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.fleet.handles import UPDATING
from cairn.engines.rollout.base import DirectReceiver, RolloutEngine
from cairn.engines.rollout.plan import LaunchPlan
from cairn.engines.rollout.sglang.kind import KIND
from cairn.engines.rollout.sglang.launch_plan import ServerPlan
from cairn.engines.types.errors import EngineDied, EngineError, WeightsDiffer
from cairn.engines.types.types import SamplingParams
from cairn.engines.weights.buckets import share
from tests.engines.training.builders import make_batch
from tests.fleets import send, verify
from tests.ray_fixtures import fleet_config
from tests.requests import group
from tests.sglang_server import sglang_config
from tests.waiting import wait_for

REQUESTED = [one for index in range(4) for one in group(index, [5 + index, 6, 7], (1, 2), SamplingParams(8))]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def on_two_machines(config: RolloutConfig, releases_memory: bool) -> LaunchPlan:
    """What is planned where an engine has as many GPUs as two machines."""
    return LaunchPlan((ServerPlan(nnodes=2, options={**config.sglang, "tp_size": 2}),), None)


@pytest.fixture(scope="module")
def fleet(sglang_model: Path, ray_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    rollout = sglang_config().model_dump(exclude={"rollout_batch_size", "rollout_max_response_len", "num_rollout"})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("machines"))
        patch.setattr(cairn.engines.rollout.sglang.kind, "KIND", replace(KIND, plan=on_two_machines))
        config = fleet_config(sglang_model, rollout=rollout, fleet={"start_timeout": 400, "call_timeout": 60})
        with Fleet.start(config, name="machines", total_steps=10) as fleet:
            yield fleet


@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_every_rank_takes_new_weights_by_what_leaves_a_machine(fleet: Fleet, transport: str, tmp_path: Path) -> None:
    (engine,) = fleet.rollout
    version = fleet.training.position().weight_version
    fleet.training.train(make_batch(), num_steps=1, expected_version=version, input_digest=str(version))
    if version:
        with pytest.raises(EngineError, match="log-probs of the same tokens differ"):
            verify(fleet)
    folder: dict[str, Any] = {"update_weight_disk_dir": str(tmp_path)} if transport == "disk" else {}
    options = fleet_config("model", fleet={"update_weight_transport": transport, "call_timeout": 60, **folder}).fleet
    send(fleet, version + 1, options)
    checksum = engine.call(UPDATING, RolloutEngine.weights_checksum).result()
    assert checksum == fleet.training.checksum_at(version + 1, "float32")
    verify(fleet)
    done = [completion for part in engine.generate(REQUESTED) for completion in part]
    assert len(done) == len(REQUESTED)
    assert {version for completion in done for version in completion.weight_versions.tolist()} == {version + 1}


def test_ranks_that_received_different_weights_are_named(fleet: Fleet) -> None:
    (engine,) = fleet.rollout
    version = fleet.training.position().weight_version
    with engine.alone():
        engine.call(UPDATING, RolloutEngine.begin_weight_update, version).result()
        for shared in fleet.training.share_weights(version, 1 << 30):
            names, handle = shared[0]
            of_ranks = [{name: tensor.clone() for name, tensor in ForkingPickler.loads(handle)}]
            of_ranks.append({name: tensor.clone() for name, tensor in of_ranks[0].items()})
            next(iter(of_ranks[1].values())).view(-1).view(torch.uint8)[5] ^= 1
            handles = [share(tensors) for tensors in of_ranks]
            engine.call(UPDATING, DirectReceiver.map_weights, names, handles).result()
        del of_ranks  # PyTorch ends a process that releases shared memory after the process that manages it has ended
        with pytest.raises(WeightsDiffer, match=r"received different weights, by checksum 0: \w+, 1: \w+"):
            engine.call(UPDATING, RolloutEngine.weights_checksum).result()
        engine.call(UPDATING, RolloutEngine.begin_weight_update, version).result()


def test_the_death_of_its_further_machine_is_noticed(fleet: Fleet) -> None:
    (engine,) = fleet.rollout
    further = psutil.Process(engine.health()["pids"][1])
    (server,) = [
        child for child in further.children(recursive=True) if child.cmdline()[1:3] == ["-m", "sglang.launch_server"]
    ]
    server.kill()
    wait_for(lambda: not server.is_running(), 60)
    with pytest.raises(EngineDied, match="SGLang server"):
        wait_for(lambda: engine.health() is None, 60)
