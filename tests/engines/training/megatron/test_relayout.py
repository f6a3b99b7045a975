"""A run that goes on with another number of ranks or another division of the model, over gloo."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.storage.opening import open_store
from tests.engines.training.builders import model_folder
from tests.engines.training.megatron.cases import ALGORITHM, BATCH, LAYERS, TRAINING
from tests.engines.training.ranks import run_megatron_ranks

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]

TP: dict[str, Any] = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
}
PP: dict[str, Any] = {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}
DP: dict[str, Any] = {"use_distributed_optimizer": True}
BEFORE, UPDATES = 2, 5
SUCCESSORS: dict[str, tuple[int, dict[str, Any]]] = {
    "half of the ranks": (2, TP),
    "stages": (4, PP),
    "stages on half of the ranks": (2, PP),
    "data parallel": (4, DP),
    "without a distributed optimizer": (2, {}),
}
"""Number of ranks and layout that go on from a checkpoint of four ranks in two tensor-parallel groups."""


def launched(rank: int, work: Path, name: str, ranks: int, megatron: dict[str, Any]) -> None:
    from cairn.engines.training.factory import make_engine

    dist.init_process_group("gloo", init_method=f"file://{work}/{name}.rendezvous", rank=rank, world_size=ranks)
    engine = make_engine(
        ModelConfig(path=str(work / "model")),
        TrainingConfig(engine="megatron", world_size=ranks, megatron=megatron, **TRAINING),
        ALGORITHM,
        temperature=1.0,
        total_steps=100,
        rank=rank,
        world_size=ranks,
    )
    store = open_store(str(work / "store"))

    def train(first: int, count: int) -> list[dict[str, float]]:
        return [
            engine.train(BATCH, num_steps=1, expected_version=version, input_digest="d").metrics
            for version in range(first, first + count)
        ]

    if name == "straight":
        train(0, BEFORE)
        engine.save(store, "saved")
    else:
        engine.load(store, "saved")
    report = {"digest": engine.state_digest(), "metrics": train(BEFORE, UPDATES)}
    weights = {key: value.tolist() for bucket in engine.export_weights(1 << 30) for key, value in bucket.items()}
    if rank == 0:
        (work / f"{name}.json").write_text(json.dumps({**report, "weights": weights}))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("relayout")
    model_folder(work / "model", layers=LAYERS)
    run_megatron_ranks(launched, work, "straight", 4, TP, world_size=4)
    return work


@pytest.mark.parametrize("name", SUCCESSORS)
def test_another_layout_goes_on_from_the_very_state_and_stays_within_1e_5(work: Path, name: str) -> None:
    ranks, megatron = SUCCESSORS[name]
    run_megatron_ranks(launched, work, name, ranks, megatron, world_size=ranks)
    straight, found = (json.loads((work / f"{one}.json").read_text()) for one in ("straight", name))
    assert found["digest"] == straight["digest"]
    for metrics, expected in zip(found["metrics"], straight["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert found["weights"].keys() == straight["weights"].keys()
    for key, weights in found["weights"].items():
        np.testing.assert_allclose(weights, straight["weights"][key], atol=1e-5, rtol=0, err_msg=key)
