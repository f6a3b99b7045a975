"""Model folders that Megatron reads on one rank and on several, and writes again."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.storage.opening import open_store
from tests.engines.training.ranks import fork_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}

OPTIONS: dict[str, dict[str, Any]] = {"MXFP4": {"expert_tensor_parallel_size": 1}}
"""Of a folder's model: Megatron does not cut experts that have biases."""


def launched(folders: Path, names: list[str], converted: list[str]) -> None:
    """Have every folder read and written again in every layout, as "<name> <layout>", and some on one rank as a
    checkpoint too, which becomes "<name> converted"."""
    for layout, megatron in LAYOUTS.items():
        ranks = 1 if layout == "one rank" else 2
        fork_ranks(read_and_write, folders, names, converted, layout, megatron, ranks, world_size=ranks)


def read_and_write(
    rank: int,
    folders: Path,
    names: list[str],
    converted: list[str],
    layout: str,
    megatron: dict[str, Any],
    ranks: int,
) -> None:
    from cairn.engines.training.factory import make_engine

    dist.init_process_group("gloo", init_method=f"file://{folders}/{layout}.rendezvous", rank=rank, world_size=ranks)
    for name in names:
        engine = make_engine(
            ModelConfig(path=str(folders / name)),
            TrainingConfig(
                engine="megatron", world_size=ranks, megatron={**megatron, **OPTIONS.get(name, {})}, num_threads=1
            ),
            AlgorithmConfig(),
            temperature=1.0,
            total_steps=1,
            rank=rank,
            world_size=ranks,
        )
        engine.export_hf(folders / f"{name} {layout}")
        if name in converted and ranks == 1:
            from cairn.engines.training.megatron.convert import export_checkpoint

            store, target, cpu = open_store(str(folders)), folders / f"{name} converted", torch.device("cpu")
            engine.save(store, f"{name} checkpoint")
            export_checkpoint(store, f"{name} checkpoint", folders / name, target, dtype="float32", device=cpu)
    dist.destroy_process_group()
