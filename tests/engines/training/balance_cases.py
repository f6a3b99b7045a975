"""What ranks do with a model whose routers have biases that every step moves, and with given experts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.factory import make_engine
from tests.architectures import VOCABULARY, architecture
from tests.engines.training.builders import make_batch, routed

RATE = 0.01
MODEL = "deepseek_v3"
CONFIG = architecture(MODEL).make_config()
LAYERS, EXPERTS = CONFIG.num_hidden_layers - CONFIG.first_k_dense_replace, CONFIG.n_routed_experts
MOVED = make_batch(9)
KNOWN = replace(MOVED, input_ids=[ids % VOCABULARY for ids in MOVED.input_ids])
GIVEN = routed(KNOWN, layers=LAYERS, experts=EXPERTS, top_k=CONFIG.num_experts_per_tok)
REPLAY = AlgorithmConfig(use_rollout_routing_replay=True)
MEGATRON: dict[str, dict[str, Any]] = {
    "TP 2, SP, EP 2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "use_distributed_optimizer": True,
    },
    "PP 2": {"pipeline_model_parallel_size": 2},
    "CP 2": {"context_parallel_size": 2},
}
TRAINING: dict[str, Any] = {"lr": 1e-4, "num_threads": 1, "max_tokens_per_gpu": 64, "moe_router_bias_update_rate": RATE}


def run(work: Path, name: str, rank: int = 0, world_size: int = 1, **training: Any) -> None:
    """Score, and take a step; what it gives and the weights after it are left in files."""
    engine = make_engine(
        ModelConfig(path=str(work / MODEL)),
        TrainingConfig(world_size=world_size, **{**TRAINING, **training}),
        REPLAY,
        temperature=1.0,
        total_steps=10,
        rank=rank,
        world_size=world_size,
    )
    scores = [values.tolist() for values in engine.score(GIVEN, "actor")]
    metrics = engine.train(GIVEN, num_steps=1, expected_version=0, input_digest="d").metrics
    weights = {key: value for bucket in engine.export_weights(1 << 20) for key, value in bucket.items()}
    report = {"scores": scores, "metrics": metrics, "digest": engine.state_digest()}
    checksum = engine.weights_checksum()
    if rank == 0:
        save_file(weights, work / f"{name}.safetensors")
        (work / f"{name}.json").write_text(json.dumps({**report, "checksum": checksum}))


def launched(rank: int, work: Path, megatron: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work}/{megatron}.rendezvous", rank=rank, world_size=2)
    if megatron:
        for name, layout in MEGATRON.items():
            recomputes = name == "PP 2"
            run(work, name, rank, 2, engine="megatron", megatron=layout, gradient_checkpointing=recomputes)
    else:
        run(work, "two ranks", rank, 2)
    dist.destroy_process_group()


def exported(work: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(work / f"{name}.safetensors")
