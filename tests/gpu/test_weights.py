"""Weights and memory between a trainer and SGLang servers on GPUs. Needs `sglang==0.5.23` beside Cairn."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import Fleet
from tests.engines.fleet.weights.test_transports import ASKED, by, train_once
from tests.fleets import send, sync, verify
from tests.ray_fixtures import fleet_config
from tests.sglang_server import sglang_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


CACHE = 4_000_000
"""Tokens in a server's cache: 2 GB of the tiny model's keys and values."""


def gpu_fleet(model: Path, num_gpus: float = 1, **fleet: Any) -> Any:
    """A server and a trainer with so much of a GPU each. SGLang's kernels for GPUs take no float32."""
    rollout = sglang_config(mem_fraction_static=0.3, max_total_tokens=CACHE, attention_backend="triton")
    return fleet_config(
        model,
        rollout=rollout.model_dump(include={"engine", "timeout", "sglang"})
        | {"dtype": "bfloat16", "num_gpus_per_engine": num_gpus},
        training={"num_gpus_per_rank": num_gpus, "num_threads": 1, "lr": 1e-2, "timeout": 60},
        fleet={"start_timeout": 600, "call_timeout": 60, "update_weight_buffer_size": 100_000, **fleet},
    )


def free_memory() -> int:
    return torch.cuda.mem_get_info(0)[0]


@pytest.fixture(scope="module")
def colocated(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("colocated"))
        with Fleet.start(gpu_fleet(sglang_model, colocate=True), name="colocated", total_steps=10) as fleet:
            yield fleet


def test_memory_changes_hands_and_weights_come_by_handle(colocated: Fleet) -> None:
    fleet = colocated
    assert fleet.rollout[0].maps_gpu_memory
    awake = free_memory()
    fleet.turns.release_rollout()
    assert free_memory() > awake + 2**30
    fleet.turns.for_training()
    version = train_once(fleet)
    assert sync(fleet) == [version]
    assert free_memory() < awake + 2**30
    (done, *_) = [completion for part in fleet.rollout[0].generate(ASKED) for completion in part]
    assert set(done.weight_versions.tolist()) == {version}
    fleet.training.onload()
    verify(fleet)


@pytest.mark.parametrize("transport", ["tensor", "disk", "distributed"])
def test_log_probs_are_the_trainers_after_an_update(
    sglang_model: Path, ray_cluster: Cluster, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = torch.cuda.device_count() > 1
    if transport == "distributed" and not apart:
        pytest.skip("NCCL needs two CUDA devices: one for training, one for the server")
    monkeypatch.chdir(tmp_path)
    with Fleet.start(gpu_fleet(sglang_model, 1 if apart else 0.5), name=f"apart-{transport}", total_steps=10) as fleet:
        for _ in range(2):
            version = train_once(fleet)
            send(fleet, version, by(transport, tmp_path))
            verify(fleet)
