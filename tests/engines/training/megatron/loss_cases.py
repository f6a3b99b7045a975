"""The layouts in which losses and corrections are held against PyTorch in one process, and what every rank does."""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from tests.engines.training.algorithms import ALGORITHMS
from tests.engines.training.builders import cut_vocabulary, with_top_tokens
from tests.engines.training.megatron.cases import CP, SEVERAL, SP, TRAINING, ZERO
from tests.engines.training.ranks import fork_ranks

BATCH = with_top_tokens(SEVERAL, k=7)
DRAWN = cut_vocabulary(BATCH)
LAYOUTS: dict[str, dict[str, Any]] = {"TP 2, SP": SP, "CP 2": CP, "DP 2, distributed optimizer": ZERO}


def two_updates(engine: Any) -> dict[str, float]:
    """The metrics of two optimizer steps, the means of both; some samples have several sequences."""
    metrics: dict[str, float] = engine.train(BATCH, num_steps=2, expected_version=0, input_digest="d").metrics
    return metrics


def teachers_rows(engine: Any) -> list[Any]:
    """The most probable tokens at each response token, of all and of the part that most were drawn from."""
    return [rows.tolist() for batch in (BATCH, DRAWN) for rows in engine.score(batch, "teacher")]


def launched(folder: Path, work: Path) -> None:
    """Every layout in turn."""
    for layout in LAYOUTS:
        fork_ranks(take_part, layout, folder, work, world_size=2)


def take_part(rank: int, layout: str, folder: Path, work: Path) -> None:
    from cairn.engines.training.factory import make_engine

    dist.init_process_group("gloo", init_method=f"file://{work}/{layout}.rendezvous", rank=rank, world_size=2)
    report: dict[str, Any] = {}
    for name, algorithm in ALGORITHMS.items():
        engine = make_engine(
            ModelConfig(path=str(folder), teacher_path=str(folder)),
            TrainingConfig(engine="megatron", world_size=2, megatron=LAYOUTS[layout], **TRAINING),
            algorithm,
            temperature=0.9,
            total_steps=100,
            rank=rank,
            world_size=2,
        )
        if algorithm.learns_from_top_k:
            report["teacher's rows"] = teachers_rows(engine)
        report[name] = two_updates(engine)
        weights = {name: tensor for bucket in engine.export_weights(1 << 30) for name, tensor in bucket.items()}
        if rank == 0:
            save_file(weights, work / f"{layout}, {name}.safetensors")
    (work / f"{layout}.{rank}.json").write_text(json.dumps(report))
