"""What two ranks do whose optimizer is in the host's memory, and a process of theirs that is killed."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cairn.storage.opening import open_store
from tests.engines.training.megatron.cases import ALGORITHM, EP, PPO, SP, ZERO
from tests.engines.training.megatron.checkpoint_cases import engine_of, train

BFLOAT16 = (("dtype", "bfloat16"),)
HOST = {**ZERO, "optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
OVERLAP = {"overlap_cpu_optimizer_d2h_h2d": True}
HALF = {"optimizer_offload_fraction": 0.5}
LAYOUTS: dict[str, dict[str, Any]] = {
    "all": HOST,
    "overlap": {**HOST, **OVERLAP},
    "half": {**HOST, **OVERLAP, **HALF},
    "tensor": {**SP, **HOST},
    "experts": {**EP, **HOST, **OVERLAP, **HALF},
}
"""Names of checkpoints after two updates, and the options of the engine that wrote them."""


def made(work: Path, layout: str, rank: int) -> Any:
    """An engine, with a critic unless its model has experts."""
    experts = layout == "experts"
    folder = work / ("experts" if experts else "model")
    return engine_of(folder, LAYOUTS.get(layout, ZERO), rank, ALGORITHM if experts else PPO, lists=BFLOAT16)


def tensors(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's master weights and moments, by kind, in the order of the optimizer's parameters."""
    pieces: dict[str, list[torch.Tensor]] = {}
    for piece in engine._actor.state._pieces():
        pieces.setdefault(piece.kind, []).append(piece.values.clone())
    return {kind: torch.cat(values) for kind, values in pieces.items()}


def trained(work: Path, rank: int) -> dict[str, Any]:
    """Two updates, a checkpoint, and two more, with every layout; and with the optimizer on the device."""
    store = open_store(str(work / "store"))
    report: dict[str, Any] = {}
    for layout in LAYOUTS:
        engine = made(work, layout, rank)
        first = engine.state_digest()
        train(engine, 0, 2)
        engine.save(store, layout)
        saved = engine.state_digest()
        if layout == "all":
            own = tensors(engine)
        engine.offload()
        engine.onload()
        report[layout] = {"first": first, "saved": saved, "metrics": train(engine, 2, 2)}
        report[layout]["ended"] = engine.state_digest()
    engine = made(work, "on the device", rank)
    report["on the device"] = {"first": engine.state_digest()}
    train(engine, 0, 2)
    engine.save(store, "on the device")
    report["on the device"]["saved"] = engine.state_digest()
    report["difference"] = {
        kind: float((values - own[kind]).abs().max() / values.abs().max()) for kind, values in tensors(engine).items()
    }
    engine.load(store, "all")
    report["all"]["read on the device"] = engine.state_digest()
    return report


def killed(work: Path, rank: int) -> None:
    """Train past the checkpoint, and die there."""
    engine = made(work, "half", rank)
    engine.load(open_store(str(work / "store")), "half")
    train(engine, 2, 1)
    (work / f"dies-{rank}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(work: Path, rank: int) -> dict[str, Any]:
    store = open_store(str(work / "store"))
    report: dict[str, Any] = {}
    for layout in LAYOUTS:
        engine = made(work, layout, rank)
        engine.load(store, layout)
        report[layout] = {"read": engine.state_digest()}
        report[layout] |= {"metrics": train(engine, 2, 2), "ended": engine.state_digest()}
    engine.load(store, "experts")
    report["bytes"] = sum(
        value.untyped_storage().nbytes()
        for part in engine._actor.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for value in state.values()
    )
    report["elements"] = sum(len(piece.values) for piece in engine._actor.state._pieces())
    engine = made(work, "half", rank)
    engine.load(store, "on the device")
    report["read from the device"] = engine.state_digest()
    return report


def launched(rank: int, work: Path, name: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work}/{name}", rank=rank, world_size=2)
    report = {"trained": trained, "killed": killed, "resumed": resumed}[name](work, rank)
    (work / f"{name}-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
