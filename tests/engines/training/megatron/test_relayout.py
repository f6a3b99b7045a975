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
STRAIGHT = "as before"
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    4: {STRAIGHT: TP, "stages": PP, "data parallel": DP},
    2: {"half of the ranks": TP, "stages on half of the ranks": PP, "without a distributed optimizer": {}},
}
"""Layouts by the number of ranks. All others go on from a checkpoint of the first one."""


def launched(rank: int, work: Path, ranks: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work}/{ranks}.rendezvous", rank=rank, world_size=ranks)
    for name, megatron in LAYOUTS[ranks].items():
        report = gone_on(rank, work, name, ranks, megatron)
        if rank == 0:
            (work / f"{name}.json").write_text(json.dumps(report))
        dist.barrier()
    dist.destroy_process_group()


def gone_on(rank: int, work: Path, name: str, ranks: int, megatron: dict[str, Any]) -> dict[str, Any]:
    """Digest of the state before some updates, and their metrics and weights."""
    from cairn.engines.training.factory import make_engine

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

    if name == STRAIGHT:
        train(0, BEFORE)
        engine.save(store, "saved")
    else:
        engine.load(store, "saved")
    report = {"digest": engine.state_digest(), "metrics": train(BEFORE, UPDATES)}
    weights = {key: value.tolist() for bucket in engine.export_weights(1 << 30) for key, value in bucket.items()}
    return {**report, "weights": weights}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("relayout")
    model_folder(work / "model", layers=LAYERS)
    for ranks in LAYOUTS:
        run_megatron_ranks(launched, work, ranks, world_size=ranks)
    return work


@pytest.mark.parametrize("name", [name for layouts in LAYOUTS.values() for name in layouts if name != STRAIGHT])
def test_another_layout_goes_on_from_the_very_state_and_stays_within_1e_5(work: Path, name: str) -> None:
    straight, found = (json.loads((work / f"{one}.json").read_text()) for one in (STRAIGHT, name))
    assert found["digest"] == straight["digest"]
    for metrics, expected in zip(found["metrics"], straight["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert found["weights"].keys() == straight["weights"].keys()
    for key, weights in found["weights"].items():
        np.testing.assert_allclose(weights, straight["weights"][key], atol=1e-5, rtol=0, err_msg=key)
