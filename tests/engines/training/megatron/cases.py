"""The layouts that are held against Hugging Face + PyTorch, and what every rank does for one of them."""

import gc
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.weights.fingerprint import weights_checksum
from tests.engines.training.builders import EXPERTS, cut_vocabulary, make_batch, routed
from tests.engines.training.ranks import fork_ranks
from tests.tiers import Tier

LAYERS = 4
ALGORITHM = AlgorithmConfig(eps_clip_high=0.28, entropy_coef=0.01, use_kl_loss=True, kl_loss_coef=0.05, use_tis=True)
PER_TOKEN = ALGORITHM.model_copy(update={"calculate_per_token_loss": True})
PPO = ALGORITHM.model_copy(update={"advantage_estimator": "ppo", "num_critic_only_steps": 1, "loss_scale_factor": 12})
SEQUENCES = ALGORITHM.model_copy(update={"loss_type": f"{Path(__file__).parents[1] / 'gspo.py'}:loss"})
BATCH = replace(make_batch(14, old=True, rollout=True, ref=True), groups=[i // 4 for i in range(14)])
CUT = cut_vocabulary(BATCH)
ROUTED = routed(BATCH, layers=LAYERS - 1, experts=EXPERTS["num_experts"], top_k=EXPERTS["num_experts_per_tok"])
REPLAY = ALGORITHM.model_copy(update={"use_rollout_routing_replay": True})
SEVERAL = replace(BATCH, samples=[0, 0, 1, 1, 2, 2, 2, 3, 4, 5, 5, 6, 7, 7])
"""As if some samples had several sequences."""
UPDATES = 5
TRAINING: dict[str, Any] = {
    "lr": 1e-3,
    "num_threads": 1,
    "max_tokens_per_gpu": 120,
    "adam_eps": 1e-5,
    "clip_grad": 0.1,
    "weight_decay": 0.01,
    "critic": {"adam_beta2": 0.9, "weight_decay": 0.1, "clip_grad": 0.3},
}
RECOMPUTED = {"gradient_checkpointing": True}
THREES = {"max_tokens_per_gpu": None, "micro_batch_size": 3}
Lists = tuple[tuple[str, Any], ...]
"""Options that say what is trained, with their patterns."""
FROZEN: Lists = (("freeze_params_name_list", ("embed_tokens", r"layers\.[01]\.", "k_norm", r"3\.mlp")),)
"""All that the first of two pipeline stages holds, and parts of the other's layers."""
EXPERTS_ALONE: Lists = (("only_train_params_name_list", ("experts",)),)


@dataclass(frozen=True)
class Case:
    """A layout of ranks."""

    name: str
    ranks: int
    megatron: dict[str, Any] = field(default_factory=dict)
    family: str = "qwen3"
    per_token: bool = False
    critic: bool = False
    cut: bool = False
    """Whether most tokens were drawn from a part of the vocabulary."""
    replay: bool = False
    """Whether routers are given the experts of most tokens."""
    sequences: bool = False
    """Whether the loss is one of sequences, from outside the tree; some samples then have several."""
    frozen: Lists = ()
    """What is frozen, or trained alone."""
    training: dict[str, Any] = field(default_factory=dict)
    tier: Tier = Tier.ALL
    """The first tier that runs it. `proofs` has every kind of parallelism, loss and number format, and each pair of
    kinds of parallelism that any case has; `architecture_cases` has the families."""

    @property
    def dtype(self) -> str:
        return str(self.training.get("dtype", "float32"))

    @property
    def bfloat16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def reference(self) -> tuple[Any, ...]:
        """Cases that have it in common are held against the same updates."""
        kinds = self.per_token, self.bfloat16, self.critic, self.cut, self.replay, self.sequences
        return self.family, *kinds, self.frozen

    def freezes(self, name: str) -> bool:
        """Whether a tensor is to stay as it is."""
        return any(
            any(re.search(pattern, name) for pattern in patterns) == option.startswith("freeze")
            for option, patterns in self.frozen
        )

    @property
    def algorithm(self) -> AlgorithmConfig:
        if self.replay:
            return REPLAY
        return PPO if self.critic else PER_TOKEN if self.per_token else SEQUENCES if self.sequences else ALGORITHM


TP, PP, CP, EP = (
    {f"{kind}_parallel_size": 2} for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
)
EP_ONE = {**EP, "expert_tensor_parallel_size": 1}
SP = {**TP, "sequence_parallel": True}
VPP = {**PP, "virtual_pipeline_model_parallel_size": 2}
ZERO = {"use_distributed_optimizer": True}
OVERLAP = {**ZERO, "overlap_grad_reduce": True, "bucket_size": 20000}

CASES = [
    Case("one rank", 1),
    Case("one rank, Qwen2.5", 1, family="qwen2"),
    Case("one rank, Llama 3", 1, family="llama"),
    Case("one rank, Qwen3-MoE", 1, family="qwen3_moe"),
    Case("one rank, GLM-4", 1, family="glm4"),
    Case("one rank, recompute, top-p", 1, cut=True, training=RECOMPUTED),
    Case("TP 2", 2, TP, tier=Tier.QUICK),
    Case("TP 2, SP, top-p", 2, SP, cut=True, tier=Tier.PROOFS),
    Case("TP 2, SP, Qwen2.5, micro-batches of 3", 2, SP, family="qwen2", training=THREES),
    Case("TP 2, Llama 3", 2, TP, family="llama"),
    Case("TP 2, SP, recompute", 2, SP, training=RECOMPUTED),
    Case("TP 2, SP, GLM-4", 2, SP, family="glm4"),
    Case("TP 2, SP, bfloat16", 2, SP, training={"dtype": "bfloat16"}, tier=Tier.PROOFS),
    Case("DP 2, distributed optimizer, bfloat16", 2, ZERO, training={"dtype": "bfloat16"}),
    Case("PP 2", 2, PP),
    Case("PP 2, Llama 3.1", 2, PP, family="llama3.1", tier=Tier.PROOFS),
    Case("PP 2, VPP 2, top-p", 2, VPP, cut=True),
    Case("DP 2", 2),
    Case("DP 2, loss per token", 2, per_token=True),
    Case("DP 2, distributed optimizer, top-p", 2, ZERO, cut=True),
    Case("DP 2, distributed optimizer, overlap", 2, OVERLAP, tier=Tier.PROOFS),
    Case("CP 2, top-p", 2, CP, cut=True),
    Case("CP 2, loss per token", 2, CP, per_token=True),
    Case("one rank, loss of sequences, small micro-batches", 1, sequences=True, training={"max_tokens_per_gpu": 64}),
    Case("DP 2, loss of sequences", 2, sequences=True, tier=Tier.PROOFS),
    Case("CP 2, loss of sequences", 2, CP, sequences=True),
    Case("TP 2, SP, PPO", 2, SP, critic=True),
    Case("PP 2, PPO", 2, PP, critic=True),
    Case("DP 2, distributed optimizer, PPO", 2, ZERO, critic=True),
    Case("CP 2, PPO", 2, CP, critic=True),
    Case("EP 2, alltoall", 2, EP, family="qwen3_moe"),
    Case("TP 2, SP, EP 2", 2, {**SP, **EP_ONE}, family="qwen3_moe"),
    Case("TP 2, SP, ETP 2", 2, SP, family="qwen3_moe"),
    Case("TP 2, SP, ETP 1", 2, {**SP, "expert_tensor_parallel_size": 1}, family="qwen3_moe"),
    Case("PP 2, Qwen3-MoE", 2, PP, family="qwen3_moe"),
    Case("EP 2, Qwen3-MoE without norm_topk_prob", 2, EP, family="qwen3_moe_raw"),
    Case("one rank, routing replay, recompute", 1, family="qwen3_moe", replay=True, training=RECOMPUTED),
    Case("TP 2, SP, EP 2, routing replay", 2, {**SP, **EP_ONE}, family="qwen3_moe", replay=True, tier=Tier.PROOFS),
    Case(
        "PP 2, VPP 2, routing replay, recompute",
        2,
        VPP,
        family="qwen3_moe",
        replay=True,
        training=RECOMPUTED,
        tier=Tier.PROOFS,
    ),
    Case("CP 2, routing replay", 2, CP, family="qwen3_moe", replay=True),
    Case("EP 2, distributed optimizer, routing replay", 2, {**EP, **ZERO}, family="qwen3_moe", replay=True),
    Case("TP 2, SP, frozen layers", 2, {**SP, **ZERO}, frozen=FROZEN),
    Case("PP 2, distributed optimizer, frozen layers", 2, {**PP, **ZERO}, frozen=FROZEN, tier=Tier.PROOFS),
    Case("DP 2, distributed optimizer, recompute, frozen layers", 2, ZERO, frozen=FROZEN, training=RECOMPUTED),
    Case("CP 2, PPO, frozen layers", 2, CP, critic=True, frozen=FROZEN, tier=Tier.PROOFS),
    Case("TP 2, SP, EP 2, experts alone", 2, {**SP, **EP_ONE}, family="qwen3_moe", frozen=EXPERTS_ALONE),
    Case("TP 2 × PP 2", 4, {**SP, **PP}, tier=Tier.PROOFS),
    Case("TP 2 × PP 2, VPP 2", 4, {**SP, **VPP}),
    Case("TP 2 × DP 2", 4, {**SP, **ZERO}, tier=Tier.PROOFS),
    Case("TP 2 × CP 2, top-p", 4, {**SP, **CP}, cut=True, tier=Tier.PROOFS),
    Case("PP 2 × DP 2", 4, {**PP, **ZERO}, per_token=True, tier=Tier.PROOFS),
    Case("EP 2 × DP 2", 4, {**EP, **ZERO}, family="qwen3_moe", tier=Tier.PROOFS),
]

WATCHED = "TP 2 × PP 2"
"""The case in which it is counted what rank 0 holds while it exports."""
ALONE = "one rank"
"""The case in which it is counted how many threads there are, before and after another engine's groups are made."""


def five_updates(engine: Any, case: Case) -> dict[str, Any]:
    """What scores, metrics and first digests an engine gives; with a critic, which alone is trained first, its values
    too, before and after."""
    batch = CUT if case.cut else ROUTED if case.replay else SEVERAL if case.sequences else BATCH
    roles = ["actor", *(["critic"] if case.critic else [])]
    report: dict[str, Any] = {"digest": engine.state_digest(), "checksum": engine.weights_checksum("bfloat16")}
    report["scores"] = [values.tolist() for role in roles for values in engine.score(batch, role)]
    report["metrics"] = [
        engine.train(
            batch, num_steps=1, expected_version=version, input_digest="d", train_actor=version > 0 or not case.critic
        ).metrics
        for version in range(UPDATES)
    ]
    report["scores"] += [values.tolist() for role in roles[1:] for values in engine.score(batch, role)]
    return report


def training_of(case: Case) -> TrainingConfig:
    return TrainingConfig(
        engine="megatron",
        world_size=case.ranks,
        megatron=case.megatron,
        **{**TRAINING, **dict(case.frozen), **case.training},
    )


def run_case(case: Case, models: Path, work: Path, rank: int) -> dict[str, Any]:
    """Five updates; the weights they end in are written by rank 0."""
    from cairn.engines.training.factory import make_engine

    engine = make_engine(
        ModelConfig(path=str(models / case.family)),
        training_of(case),
        case.algorithm,
        temperature=0.9,
        total_steps=100,
        rank=rank,
        world_size=case.ranks,
    )
    repeated = engine.gradient_digests(BATCH, num_steps=1) if case.name == WATCHED else None
    report = {"gradient digests": repeated, **five_updates(engine, case)}
    weights = {name: tensor for bucket in engine.export_weights(50_000) for name, tensor in bucket.items()}
    checksum = engine.weights_checksum()
    if rank == 0:
        assert weights_checksum(weights.items()) == checksum
        save_file(weights, work / f"{CASES.index(case)}.safetensors")
    if case.name == WATCHED:
        report["held"] = bytes_while_exporting(engine)
    return report


def bytes_while_exporting(engine: Any) -> int:
    """The most bytes of tensors that there were at a time on rank 0, beside those before, while it exported weights in
    buckets of a byte."""
    most, before, counts = 0, dict[int, int](), dist.get_rank() == 0
    if counts:
        gc.collect()
        before = bytes_of_storages()
        gc.freeze()  # so that each look is at what came after
    for _ in engine.export_weights(1):
        if counts:
            most = max(most, sum(size for place, size in bytes_of_storages().items() if place not in before))
    most_bytes = torch.tensor(most)
    dist.broadcast(most_bytes, 0)
    return int(most_bytes)


def bytes_of_storages() -> dict[int, int]:
    """By their place; views have the same."""
    storages = [thing.untyped_storage() for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def number_of_threads(after: Callable[[], None] = lambda: None) -> int:
    after()
    gc.collect()
    return len(os.listdir("/proc/self/task"))


def launched(models: Path, work: Path, cases: Sequence[Case]) -> None:
    """Run these cases, every rank in a process forked for it, which leaves a report and takes with it what Megatron
    keeps: over gloo every process group has three threads."""
    for case in cases:
        fork_ranks(take_part, case, models, work, world_size=case.ranks)


def take_part(rank: int, case: Case, models: Path, work: Path) -> None:
    from cairn.engines.training.megatron.model import join_groups

    where = work / str(CASES.index(case))
    dist.init_process_group("gloo", init_method=f"file://{where}.rendezvous", rank=rank, world_size=case.ranks)
    report = run_case(case, models, work, rank)
    if case.name == ALONE:
        report["threads"] = [number_of_threads(), number_of_threads(after=lambda: join_groups(training_of(case)))]
    where.with_suffix(f".{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def weights_after(case: Case, work: Path) -> dict[str, torch.Tensor]:
    return load_file(work / f"{CASES.index(case)}.safetensors")
