"""Checkpoints as Megatron-LM and slime write them: `save_checkpoint` of megatron/training/checkpointing.py, which is no
part of megatron-core, in the same words over megatron-core's own functions."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.megatron.backend import backend_for
from tests.engines.training.ranks import fork_ranks
from tests.forged_checkpoints import (
    Payload,
    as_a_tensor,
    as_the_metadata,
    everywhere,
    in_a_plan_of_the_metadata,
    in_the_common_part,
    outcome,
    outside_of_the_checkpoint,
)

PADDED = 512
"""Rows of the vocabulary, as for `make_vocab_size_divisible_by` 128 over two ranks rounded up once more."""


@dataclass(frozen=True)
class Written:
    """A checkpoint."""

    name: str
    architecture: str
    megatron: dict[str, Any] = field(default_factory=dict)
    stacked: bool = True
    """Whether Megatron takes the layers for alike."""
    metadata: dict[str, Any] = field(default_factory=dict)
    release: bool = False
    """Whether it is no iteration's, as what slime makes of a model folder."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Parts of names of what others add to Megatron."""


WRITTEN = [
    Written("stacked, TP 2", "qwen3", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, release=True),
    Written("experts, stacked, EP 2", "qwen3_moe", {"expert_model_parallel_size": 2}),
    Written("experts, singly", "qwen3_moe", {"expert_model_parallel_size": 2}, False, {"singleton_local_shards": True}),
    Written("latent attention, PP 2", "deepseek_v3", {"pipeline_model_parallel_size": 2}, False),
    Written(
        "norms of slime's",
        "glm4",
        renamed={"self_attn_bda.norm": "post_self_attn_layernorm", "mlp_bda.norm": "post_mlp_layernorm"},
    ),
]
FORGERIES: list[Callable[..., None]] = [
    everywhere,
    in_the_common_part,
    as_the_metadata,
    in_a_plan_of_the_metadata,
    as_a_tensor,
    outside_of_the_checkpoint,
]


def launched(work: Path) -> None:
    """Write every checkpoint by two ranks, then convert each, and forgeries of the first, in one process."""
    for number, written in enumerate(WRITTEN):
        fork_ranks(write, number, written, work, world_size=2)
    fork_ranks(convert, work, world_size=1)


def write(rank: int, number: int, written: Written, work: Path) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from cairn.engines.training.megatron.model import join_groups, load_model

    dist.init_process_group("gloo", init_method=f"file://{work}/{number}.rendezvous", rank=rank, world_size=2)
    folder = work / written.architecture
    training = TrainingConfig(engine="megatron", world_size=2, megatron=written.megatron)
    join_groups(training)
    (chunk,) = load_model(folder, training, backend_for(torch.device("cpu")), trained=False).chunks
    if written.stacked and isinstance(chunk.config.moe_layer_freq, list):
        chunk.config.moe_layer_freq = 1  # Megatron-LM's own default
    weights = chunk.sharded_state_dict(metadata={"chained_optim_avoid_prefix": True, **written.metadata})
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in weights:
            weights[name] = padded(folder, weights[name])
    for value in weights.values():
        for name, foreign_name in written.renamed.items():
            value.key = value.key.replace(name, foreign_name)
    state = {
        "args": Namespace(num_layers=4, hidden_size=64, iteration=7),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": weights,
        "num_floating_point_operations_so_far": 0,
        "opt_param_scheduler": {"max_lr": 1e-6, "num_steps": 7},
        "rng_state": ShardedObject(
            "rng_state",
            [{"random_rng_state": (3, (1, 2), None)}],
            (
                parallel_state.get_pipeline_model_parallel_world_size(),
                parallel_state.get_tensor_model_parallel_world_size(),
            ),
            (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
            replica_id=parallel_state.get_data_parallel_rank(),
        ),
    }
    target = work / written.name / ("release" if written.release else "iter_0000007")
    if rank == 0:
        target.mkdir(parents=True)
        (work / written.name / "latest_checkpointed_iteration.txt").write_text("release" if written.release else "7")
    dist.barrier()
    dist_checkpointing.save(state, str(target))
    dist.destroy_process_group()


def padded(folder: Path, value: Any) -> Any:
    """The rows of a vocabulary that is filled up, of this rank's part of it."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    name = "lm_head.weight" if value.key == "output_layer.weight" else "model.embed_tokens.weight"
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        real = file.get_tensor(name)
    rows = torch.cat([real, torch.full((PADDED - len(real), real.shape[1]), 7.0)])
    return ShardedTensor.from_rank_offsets(
        value.key, rows.chunk(ranks)[rank], (0, rank, ranks), replica_id=value.replica_id, allow_shape_mismatch=True
    )


def convert(rank: int, work: Path) -> None:
    from cairn.engines.training.megatron.convert import export_torch_dist, find_torch_dist

    def export(source: Path, architecture: str, target: Path) -> None:
        found = find_torch_dist(source)
        assert found is not None
        export_torch_dist(found, work / architecture, target, dtype="float32", device=torch.device("cpu"))

    report: dict[str, Any] = {"forged": {}}
    for written in WRITTEN:
        export(work / written.name, written.architecture, work / f"{written.name} converted")
    first = WRITTEN[-1]
    report["of another model"] = outcome(lambda: export(work / first.name, "qwen2", work / "other"))
    for forgery in FORGERIES:
        mark, forged = work / f"mark-{forgery.__name__}", work / f"forged-{forgery.__name__}"
        shutil.copytree(work / first.name, forged)
        files = {path.name: path.read_bytes() for path in (forged / "iter_0000007").iterdir()}
        forgery(files, Payload(mark))
        for name, data in files.items():
            (forged / "iter_0000007" / name).write_bytes(data)
        found = outcome(lambda forged=forged: export(forged, first.architecture, forged / "converted"))
        report["forged"][forgery.__name__] = {"outcome": found, "ran": mark.exists()}
    (work / "report.json").write_text(json.dumps(report, indent=1))
