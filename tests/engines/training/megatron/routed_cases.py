"""What two ranks do with models whose routers have biases: buffers that no gradient changes and that are state all the
same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.weights.fingerprint import weights_checksum
from cairn.storage.opening import open_store
from tests.architectures import VOCABULARY
from tests.engines.training.megatron.cases import BATCH, EP_ONE, EXPERTS_ALONE, PPO, SP, TRAINING, ZERO

MODELS = ("deepseek_v3", "minimax_m2")
KNOWN = replace(BATCH, input_ids=[ids % VOCABULARY for ids in BATCH.input_ids])
FIRST, SECOND = {**SP, **ZERO}, {**EP_ONE, **ZERO}
"""Layouts: the one that writes the checkpoint, and another that reads it."""


def engine_of(folder: Path, rank: int, megatron: dict[str, Any], **training: Any) -> Any:
    from cairn.engines.training.factory import make_engine

    return make_engine(
        ModelConfig(path=str(folder)),
        TrainingConfig(engine="megatron", world_size=2, megatron=megatron, **{**TRAINING, **training}),
        PPO,
        temperature=1.0,
        total_steps=100,
        rank=rank,
        world_size=2,
    )


def train(engine: Any, version: int) -> dict[str, float]:
    metrics: dict[str, float] = engine.train(KNOWN, num_steps=1, expected_version=version, input_digest="d").metrics
    return metrics


def exported(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value for bucket in engine.export_weights(1 << 20) for name, value in bucket.items()}


def move_biases(engine: Any) -> None:
    """As what balances experts would, between two updates."""
    for parameter in engine._actor.state._parameters:
        if parameter.exact:
            parameter.value.add_(torch.linspace(-0.01, 0.02, len(parameter.value)))


def cases(name: str, work: Path, rank: int) -> dict[str, Any]:
    folder, store = work / name, open_store(str(work / "store"))
    report: dict[str, Any] = {}

    def keep(what: str, weights: dict[str, torch.Tensor]) -> None:
        if rank == 0:
            save_file(weights, work / f"{name} {what}.safetensors")
            report[f"{what}, checksum"] = weights_checksum(weights.items())

    engine = engine_of(folder, rank, FIRST)
    before = engine.state_digest()
    move_biases(engine)
    report["digest of moved biases"] = engine._compute_digest() != before
    train(engine, 0)
    engine.save(store, name)
    keep("saved", exported(engine))
    report["saved"] = [engine.state_digest(), engine.weights_checksum()]
    engine.offload()
    keep("offloaded", exported(engine))
    engine.onload()
    report["onloaded"] = [engine._compute_digest(), engine.weights_checksum()]
    metrics, ended = train(engine, 1), engine.state_digest()
    loaded = engine_of(folder, rank, FIRST)
    loaded.load(store, name)
    report["read"] = [loaded.state_digest(), loaded.weights_checksum()]
    report["resumed bitwise"] = [train(loaded, 1) == metrics, loaded.state_digest() == ended]
    other = engine_of(folder, rank, SECOND)
    other.load(store, name)
    report["read by another layout"] = [other.state_digest(), other.weights_checksum()]
    report["metrics"], report["metrics of another layout"] = metrics, train(other, 1)
    keep("ended", exported(other))
    rounded = engine_of(folder, rank, FIRST, dtype="bfloat16", gradient_checkpointing=True)
    move_biases(rounded)
    train(rounded, 0)
    rounded.save(store, f"{name} rounded")
    keep("rounded", exported(rounded))
    read = engine_of(folder, rank, SECOND, dtype="bfloat16")
    read.load(store, f"{name} rounded")
    report["rounded"] = [rounded.weights_checksum("bfloat16"), read.weights_checksum("bfloat16")]
    alone = engine_of(folder, rank, SECOND, **dict(EXPERTS_ALONE))
    train(alone, 0)
    train(alone, 1)
    keep("experts alone", exported(alone))
    return report


def launched(rank: int, work: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=2)
    report = {name: cases(name, work, rank) for name in MODELS}
    (work / f"report-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
    if rank == 0:
        from cairn.engines.training.megatron.convert import export_checkpoint

        for name in MODELS:
            export_checkpoint(
                open_store(str(work / "store")),
                name,
                work / name,
                work / f"{name} converted",
                dtype="float32",
                device=torch.device("cpu"),
            )
