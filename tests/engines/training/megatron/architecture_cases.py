"""Every published architecture in the layouts that it is held against transformers in, and what every rank does for
one of them."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.multiprocessing.spawn import ProcessException
from transformers import PreTrainedModel

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.megatron.families import UNMAPPED
from tests.architectures import ARCHITECTURES, VOCABULARY, Architecture
from tests.engines.training.builders import make_batch
from tests.engines.training.ranks import fork_ranks
from tests.model_table import Check
from tests.tiers import Tier

_DRAWN = make_batch(6, seed=3)
BATCH = replace(_DRAWN, input_ids=[ids % VOCABULARY for ids in _DRAWN.input_ids])
PROVED = tuple(each.name for each in ARCHITECTURES if each.named)
"""Architectures that the tier `proofs` runs too: those that Cairn promises."""


@dataclass(frozen=True)
class Layout:
    name: str
    megatron: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2


ONE = Layout(Check.LOGITS, ranks=1)
TENSOR = Layout(Check.TENSOR, {"tensor_model_parallel_size": 2})
TENSOR_OF_EXPERTS = Layout(Check.TENSOR, {"tensor_model_parallel_size": 2, "sequence_parallel": True})
TENSOR_WHOLE_EXPERTS = Layout(Check.TENSOR, {**TENSOR_OF_EXPERTS.megatron, "expert_tensor_parallel_size": 1})
PIPELINE = Layout(Check.PIPELINE, {"pipeline_model_parallel_size": 2})
EXPERTS = Layout(Check.EXPERTS, {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1})


CONTEXT = Layout("CP 2", {"context_parallel_size": 2})
CONTEXT_GATHERED = Layout("CP 2, allgather", {**CONTEXT.megatron, "cp_comm_type": "allgather"})
VIRTUAL = Layout("PP 2, VPP 2", {**PIPELINE.megatron, "virtual_pipeline_model_parallel_size": 2})
RECOMPUTED = Layout("TP 2, recompute", TENSOR_OF_EXPERTS.megatron, {"gradient_checkpointing": True})
LATENTS_RECOMPUTED = Layout(
    "TP 2, latents recomputed",
    {**TENSOR_OF_EXPERTS.megatron, "recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "moe"]},
)
SPREAD = Layout("TP 2, EP 2", {**TENSOR_WHOLE_EXPERTS.megatron, "expert_model_parallel_size": 2})
SPREAD_TWICE = Layout("TP 2, EP 2 × DP 2", SPREAD.megatron, ranks=4)
WHOLE_TWICE = Layout("TP 2, ETP 1 × DP 2", TENSOR_WHOLE_EXPERTS.megatron, ranks=4)
BESIDES = {
    "deepseek_v3": [CONTEXT, VIRTUAL, RECOMPUTED, LATENTS_RECOMPUTED, SPREAD_TWICE],
    "minimax_m2": [CONTEXT, RECOMPUTED, SPREAD],
    "glm4_moe": [CONTEXT, VIRTUAL, SPREAD],
    "qwen3_moe": [WHOLE_TWICE],
    "qwen3_next": [CONTEXT, RECOMPUTED, SPREAD],
    "gpt_oss": [CONTEXT, SPREAD_TWICE, WHOLE_TWICE],
    "glm_moe_dsa": [CONTEXT_GATHERED, RECOMPUTED, SPREAD],
}
"""Layouts of some architectures that are more than a column of the table."""


def layouts_of(architecture: Architecture) -> list[Layout]:
    if not architecture.experts:
        return [ONE, TENSOR, PIPELINE]
    # Megatron does not cut experts that have biases.
    tensor = TENSOR_WHOLE_EXPERTS if architecture.model_type == "gpt_oss" else TENSOR_OF_EXPERTS
    return [ONE, tensor, PIPELINE, EXPERTS, *BESIDES.get(architecture.name, ())]


@dataclass(frozen=True)
class Case:
    architecture: Architecture
    layout: Layout

    @property
    def name(self) -> str:
        return f"{self.architecture.name}, {self.layout.name}"

    @property
    def tier(self) -> Tier:
        return Tier.PROOFS if self.architecture.name in PROVED and self.layout.name in list(Check) else Tier.ALL


REFUSED = {each.name for each in ARCHITECTURES if each.model_type in UNMAPPED}
CASES = [Case(each, layout) for each in ARCHITECTURES if each.name not in REFUSED for layout in layouts_of(each)]


def loss_of(model: PreTrainedModel) -> tuple[torch.Tensor, list[np.ndarray]]:
    """What has the gradient of the policy gradient's first step, where every ratio is 1: the mean over samples of the
    mean over their trained tokens of advantage times negative log-prob; and the log-probs of response tokens."""
    losses, scores = [], []
    columns = zip(BATCH.input_ids, BATCH.response_lengths, BATCH.loss_mask, BATCH.advantages, strict=True)
    for ids, length, mask, advantages in columns:
        tokens = torch.from_numpy(ids.astype(np.int64))
        log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[-length:, 0]
        trained = torch.from_numpy(mask.astype(np.float32))
        losses.append(-(log_probs * torch.from_numpy(advantages) * trained).sum() / trained.sum())
        scores.append(log_probs.detach().numpy())
    return torch.stack(losses).mean(), scores


def make_reference(architecture: Architecture, folder: Path) -> None:
    """A model folder, and beside it what transformers and autograd make of the batch: log-probs, and the gradients by
    the published names of their weights, for which the library writes them as if they were a model."""
    model = architecture.make()
    model.save_pretrained(folder / "model")
    loss, scores = loss_of(model)
    loss.backward()
    norm = math.sqrt(sum(float(each.grad.square().sum()) for each in model.parameters() if each.grad is not None))
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    trained = {name for name, _ in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if name not in trained:
            buffer.zero_()
    model.save_pretrained(folder / "gradients")
    np.savez(folder / "scores.npz", *scores)
    (folder / "metrics.json").write_text(json.dumps({"grad_norm": norm}))


def run_case(case: Case, models: Path, work: Path, rank: int) -> None:
    """Log-probs, weights and gradients of one update, all written by rank 0."""
    from cairn.engines.training.factory import make_engine

    training = TrainingConfig(
        engine="megatron",
        world_size=case.layout.ranks,
        megatron=case.layout.megatron,
        num_threads=1,
        clip_grad=0.0,
        **case.layout.training,
    )
    engine: Any = make_engine(
        ModelConfig(path=str(models / case.architecture.name / "model")),
        training,
        AlgorithmConfig(),
        temperature=1.0,
        total_steps=10,
        rank=rank,
        world_size=case.layout.ranks,
    )
    state = {
        "digest": engine.state_digest(),
        "checksum": engine.weights_checksum(),
        "rounded checksum": engine.weights_checksum("bfloat16"),
    }
    scores = engine.score(BATCH, "actor")
    weights = exported(engine)
    metrics = engine.train(BATCH, num_steps=1, expected_version=0, input_digest="d").metrics
    gradients = dict(gradients_of(engine))
    after = [engine.score(BATCH, "actor"), exported(engine), engine.weights_checksum()] if case.layout == ONE else []
    if rank == 0:
        folder = folder_of(case, work)
        folder.mkdir(parents=True)
        np.savez(folder / "scores.npz", *scores)
        save_file(weights, folder / "weights.safetensors")
        save_file(gradients, folder / "gradients.safetensors")
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "metrics.json").write_text(json.dumps(metrics))
        if after:
            np.savez(folder / "trained.npz", *after[0])
            save_file(after[1], folder / "trained.safetensors")
            (folder / "trained.txt").write_text(after[2])


def exported(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value for bucket in engine.export_weights(1 << 20) for name, value in bucket.items()}


def gradients_of(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The gradients of the last update as whole tensors, by the published names of the weights, on rank 0."""
    from cairn.engines.training.megatron.gathering import Replica, gather

    of_model = engine._actor.state._parameters
    gradients = [replace(each, value=each.value.main_grad) for each in of_model if each.trained]
    replicas, cpu = Replica.agree(gradients), torch.device("cpu")
    for bucket in gather(gradients, replicas, torch.float32, cpu, torch.Tensor.detach, 1 << 20):
        yield from bucket.items()


def launched(models: Path, work: Path, cases: Sequence[Case]) -> None:
    """Run these cases, every rank in a process that is forked for it."""
    for case in cases:
        try:
            fork_ranks(take_part, case, models, work, world_size=case.layout.ranks)
        except ProcessException as error:
            folder_of(case, work).with_suffix(".error").write_text(str(error))


def take_part(rank: int, case: Case, models: Path, work: Path) -> None:
    where = work / f"{CASES.index(case)}.rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=case.layout.ranks)
    run_case(case, models, work, rank)
    dist.destroy_process_group()


def folder_of(case: Case, work: Path) -> Path:
    """Of what a case has found. Raises what its ranks raised."""
    folder = work / str(CASES.index(case))
    if (error := folder.with_suffix(".error")).exists():
        raise AssertionError(error.read_text())
    return folder


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)
