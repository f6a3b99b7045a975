"""Weights and memory between a trainer and SGLang servers on GPUs. Needs `sglang==0.5.21` beside Cairn."""

import io
import pickle
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.weights.buckets import DEVICE_ARGUMENT, in_one_storage, share
from tests.engines.fleet.weights.test_transports import ASKED, by, train_once
from tests.engines.training.builders import make_batch, make_engine, model_folder
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


def _rebuild(*arguments: Any) -> torch.Tensor:
    """As SGLang's servers do: PyTorch itself knows no GPU by its identity."""
    identities = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    index = identities.index(arguments[DEVICE_ARGUMENT])
    return rebuild_cuda_tensor(*arguments[:DEVICE_ARGUMENT], index, *arguments[DEVICE_ARGUMENT + 1 :])


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _rebuild if name == rebuild_cuda_tensor.__name__ else super().find_class(module, name)


def _read(handle: bytes, found: Any) -> None:
    found.put({name: tensor.sum().item() for name, tensor in _Reader(io.BytesIO(handle)).load()})


def test_a_handle_shows_another_process_the_same_memory() -> None:
    tensors = in_one_storage({name: torch.full((7, 3), float(name)) for name in "123"}, torch.device("cuda"))
    context = get_context("spawn")
    found = context.Queue()
    reader = context.Process(target=_read, args=(share(tensors), found))
    reader.start()
    assert found.get(timeout=60) == {"1": 21.0, "2": 42.0, "3": 63.0}
    reader.join(60)


def test_an_offloaded_trainer_frees_its_memory_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    plain, offloaded = (make_engine(folder, device="cuda") for _ in range(2))
    for version in range(3):
        for engine in (plain, offloaded):
            engine.train(make_batch(), num_steps=1, expected_version=version, input_digest=str(version))
        held = torch.cuda.memory_allocated()
        offloaded.offload()
        assert torch.cuda.memory_allocated() < held
        assert offloaded.position().state_digest == plain.position().state_digest
        offloaded.onload()
    assert offloaded.state_digest() == plain.state_digest()


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
