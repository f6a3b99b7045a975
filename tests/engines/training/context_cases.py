"""What ranks that share sequences do together, reported as JSON by rank 0; one rank does the same on padded rows."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.training import LoraConfig
from cairn.engines.training.torch.engine import TorchEngine
from cairn.storage.opening import open_store
from tests.architectures import architecture
from tests.engines.training.algorithms import ALGORITHMS
from tests.engines.training.balance_cases import GIVEN, KNOWN, REPLAY
from tests.engines.training.builders import cut_vocabulary, make_engine, model_folder, part_of, weights_of
from tests.engines.training.sharded_cases import ALGORITHM, BATCH, CLIP, FROZEN, PPO, SEQUENCES

LAYOUTS = {"2 ranks, CP 2": (2, 2), "4 ranks, CP 2": (4, 2), "4 ranks, CP 4": (4, 4)}
"""World size and ranks that share each sequence. CP 4 repeats the key-value heads, of which there are two."""
SINGLE = part_of(BATCH, slice(1))
"""Shorter than four ranks are useful for: some predict none of its tokens."""

CASES: dict[str, dict[str, Any]] = {
    "policy": {"algorithm": ALGORITHM},
    "one micro-batch": {"algorithm": ALGORITHM, "max_tokens_per_gpu": None},
    "micro-batches of three": {"algorithm": ALGORITHM, "max_tokens_per_gpu": None, "micro_batch_size": 3},
    "a single sample": {"algorithm": ALGORITHM, "batch": SINGLE, "num_steps": 1},
    "cut vocabulary": {"algorithm": ALGORITHM, "batch": cut_vocabulary(BATCH)},
    "loss of sequences": {"algorithm": SEQUENCES},
    "critic": {"algorithm": PPO, "role": "critic"},
    "demonstrations": {"algorithm": AlgorithmConfig(loss_type="sft_loss")},
    "preferences": {"algorithm": AlgorithmConfig(advantage_estimator="dpo")},
    "adapters": {"algorithm": ALGORITHM, "lora": LoraConfig(r=4), "lr": 1e-2},
    "frozen": {"algorithm": ALGORITHM, "freeze_params_name_list": FROZEN, "weight_decay": 0.1},
    "recomputed, on the host": {"algorithm": ALGORITHM, "gradient_checkpointing": True, "fsdp_cpu_offload": True},
    "bfloat16": {"algorithm": ALGORITHM, "dtype": "bfloat16"},
    "experts of the rollout": {
        "algorithm": REPLAY,
        "model": "deepseek_v3",
        "batch": GIVEN,
        "moe_router_bias_update_rate": 0.01,
        "num_steps": 1,
    },
    "windows and sinks": {"algorithm": AlgorithmConfig(), "model": "gpt_oss", "batch": KNOWN, "num_steps": 1},
    **{name: {"algorithm": algorithm, "role": "teacher"} for name, algorithm in ALGORITHMS.items()},
}


def save_models(work: Path) -> None:
    model_folder(work / "qwen3")
    for name in ("deepseek_v3", "gpt_oss"):
        architecture(name).save(work / name)


def run_cases(work: Path, rank: int, world_size: int, context: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    for name, case in CASES.items():
        options = {"max_tokens_per_gpu": 120 // context, "clip_grad": CLIP, "adam_eps": 1e-5, **case}
        folder = work / options.pop("model", "qwen3")
        batch, role, steps = options.pop("batch", BATCH), options.pop("role", "actor"), options.pop("num_steps", 2)
        engine = make_engine(
            folder, teacher=folder, rank=rank, world_size=world_size, context_parallel_size=context, **options
        )
        if role == "teacher" and not options["algorithm"].learns_from_top_k:
            role = "actor"
        scores = [values.tolist() for values in engine.score(batch, role)]
        metrics = engine.train(batch, num_steps=steps, expected_version=0, input_digest="d").metrics
        weights = {name: tensor.float().tolist() for name, tensor in weights_of(engine).items()}
        report[name] = {"scores": scores, "metrics": metrics, "weights": weights}
    return report


def launched(rank: int, work: Path, name: str) -> None:
    world_size, context = LAYOUTS[name]
    _meet(work, name, rank, world_size)
    report = run_cases(work, rank, world_size, context)
    if rank == 0:
        (work / f"{name}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def interrupted(rank: int, work: Path) -> None:
    """Four updates in one go; then three, of which two are saved, and the end of the process."""
    _meet(work, "interrupted", rank, 4)
    digest = _updates(_engine(work, rank), 0, 4)
    engine = _engine(work, rank)
    _updates(engine, 0, 2)
    engine.save(open_store(str(work / "store")), "two")
    _updates(engine, 2, 3)
    if rank == 0:
        (work / "straight").write_text(digest)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(rank: int, work: Path) -> None:
    _meet(work, "resumed", rank, 4)
    engine = _engine(work, rank)
    engine.load(open_store(str(work / "store")), "two")
    digest = _updates(engine, 2, 4)
    if rank == 0:
        (work / "after the kill").write_text(digest)
    dist.destroy_process_group()


def _meet(work: Path, name: str, rank: int, world_size: int) -> None:
    rendezvous = f"file://{work}/{name}.rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)


def _engine(work: Path, rank: int) -> TorchEngine:
    options = {"context_parallel_size": 2, "max_tokens_per_gpu": 60, "gradient_checkpointing": True}
    return make_engine(work / "qwen3", algorithm=ALGORITHM, rank=rank, world_size=4, **options)


def _updates(engine: TorchEngine, first: int, last: int) -> str:
    for version in range(first, last):
        batch = replace(BATCH, advantages=[(version + 1) * values for values in BATCH.advantages or []])
        engine.train(batch, num_steps=1, expected_version=version, input_digest=str(version))
    return engine.state_digest()
