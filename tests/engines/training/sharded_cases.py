"""What two ranks do together in one launch, reported as JSON by rank 0; `run_cases` is also run by a single rank."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.torch.engine import TorchEngine
from cairn.engines.weights.fingerprint import weights_checksum
from cairn.storage.opening import open_store
from cairn.storage.store.errors import StoreRefused
from cairn.storage.store.store import Store
from tests.architectures import architecture
from tests.engines.training.algorithms import ALGORITHMS
from tests.engines.training.builders import InParts, Kept, make_batch, make_engine, part_of, weights_of, with_top_tokens

EPS = 1e-5
CLIP = 0.1
ALGORITHM = AlgorithmConfig(eps_clip_high=0.28, entropy_coef=0.01, use_kl_loss=True, kl_loss_coef=0.05, use_tis=True)
PER_TOKEN = ALGORITHM.model_copy(update={"calculate_per_token_loss": True})
PPO = ALGORITHM.model_copy(update={"advantage_estimator": "ppo"})
SEQUENCES = ALGORITHM.model_copy(update={"loss_type": f"{Path(__file__).parent / 'gspo.py'}:loss"})
FROZEN = ("embed_tokens", r"layers\.0\.", "k_norm")
"""A whole layer, and a part of another one."""
OF_WHOLE_STEPS = ("CISPO, IcePop", "Clip-Cov")
"""Algorithms that read the tokens of a whole optimizer step: one normalises its weights, one picks tokens."""
BATCH = with_top_tokens(
    dataclasses.replace(make_batch(14, old=True, rollout=True, ref=True), groups=[i // 4 for i in range(14)]), k=7
)
"""Cut into an odd number of micro-batches of uneven sizes by 120 tokens."""


class FullStore:
    """A store that has no room for the parts of one rank."""

    def __init__(self, store: Store, rank: int = 0):
        self._store, self._full = store, f"/{rank:05d}-"

    def write(self, path: str, data: bytes) -> None:
        if self._full in path:
            raise StoreRefused("no space left")
        self._store.write(path, data)


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def run_cases(folder: Path, work: Path, rank: int, world_size: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    torch.set_num_threads(1)
    store = open_store(str(work / "store"))
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}

    engine = make_engine(folder, algorithm=ALGORITHM, max_tokens_per_gpu=120, adam_eps=EPS, clip_grad=CLIP, **ranks)
    report["initial digest"] = engine.state_digest()
    report["initial checksums"] = [engine.weights_checksum(), engine.weights_checksum("bfloat16")]
    report["scores"] = [values.tolist() for values in engine.score(BATCH, "ref")]
    single = part_of(BATCH, slice(1))
    report["one score"] = engine.score(single, "actor")[0].tolist()

    metrics = [
        engine.train(BATCH, num_steps=1, expected_version=version, input_digest="d").metrics for version in range(5)
    ]
    report["metrics"] = metrics
    report["weights"] = {name: tensor.tolist() for name, tensor in weights_of(engine).items()}
    engine.save(store, f"ranks-{world_size}")
    report["saved digest"] = engine.state_digest()
    engine.export_hf(work / f"hf-{world_size}")

    report["failed save"] = raised(lambda: engine.save(FullStore(store), "full"))  # type: ignore[arg-type]
    assert BATCH.advantages is not None
    broken = dataclasses.replace(BATCH, advantages=[np.full_like(BATCH.advantages[0], np.nan), *BATCH.advantages[1:]])
    report["not finite"] = raised(lambda: engine.train(broken, num_steps=1, expected_version=5, input_digest="d"))
    report["digest after failures"] = engine.position().state_digest
    report["single sample"] = engine.train(single, num_steps=1, expected_version=5, input_digest="d").metrics

    critic = make_engine(folder, algorithm=PPO, max_tokens_per_gpu=120, adam_eps=EPS, clip_grad=CLIP, **ranks)
    report["gradient digests"] = [critic.gradient_digests(part, num_steps=1) for part in (BATCH, single)]
    report["critic's initial digest"] = critic.state_digest()
    report["critic's metrics"] = critic.train(BATCH, num_steps=2, expected_version=0, input_digest="d").metrics
    report["values"] = [values.tolist() for values in critic.score(BATCH, "critic")]
    critic.save(store, f"critic-{world_size}")
    report["critic's digest"] = critic.state_digest()

    clipped: dict[str, Any] = {"algorithm": ALGORITHM, "max_tokens_per_gpu": 120, "adam_eps": EPS, "clip_grad": CLIP}

    def update(engine: TorchEngine, version: int) -> dict[str, float]:
        return engine.train(BATCH, num_steps=1, expected_version=version, input_digest="d").metrics

    fused = make_engine(folder, **clipped, **ranks)
    for group in fused._learners["actor"].optimizer.param_groups:  # type: ignore[attr-defined]
        group["fused"] = True  # as on the host
    hosted = make_engine(folder, fsdp_cpu_offload=True, **clipped, **ranks)
    report["fused"], report["on the host"] = ([update(each, v) for v in range(3)] for each in (fused, hosted))
    report["fused digest"], report["host's saved digest"] = fused.state_digest(), hosted.state_digest()
    hosted.save(store, f"host-{world_size}")
    report["host's next"] = [update(hosted, 3), hosted.state_digest()]
    hosted = make_engine(folder, fsdp_cpu_offload=True, **clipped, **ranks)
    hosted.load(store, f"host-{world_size}")
    hosted.offload()
    hosted.onload()
    report["host's next again"] = [update(hosted, 3), hosted.state_digest()]

    for name, algorithm in {"plain": ALGORITHM, **{name: ALGORITHMS[name] for name in OF_WHOLE_STEPS}}.items():
        whole, parted = (make_engine(folder, max_tokens_per_gpu=120, algorithm=algorithm, **ranks) for _ in range(2))
        report[f"from parts: {name}"] = [
            made.train(batch, num_steps=2, expected_version=0, input_digest="d").state_digest
            for made, batch in ((whole, BATCH), (parted, InParts(BATCH, 3)))
        ]
    scored = whole.score(BATCH, "ref"), parted.write_scores(InParts(BATCH, 3), ["ref"], Kept())
    report["scored from parts"] = (
        None if rank else [[one.tolist() for one in scored[0]], [one.tolist() for one in scored[1]["ref"]]]
    )

    experts = work / "experts"
    mixture = make_engine(experts if experts.is_dir() else architecture("deepseek_v3").save(experts), **ranks)
    report["checksums of experts"] = [mixture.weights_checksum(), mixture.weights_checksum("bfloat16")]
    sent = weights_of(mixture)
    report["checksum of sent experts"] = weights_checksum(sent.items()) if rank == 0 else None

    variants: dict[str, dict[str, Any]] = {
        "per token": {"algorithm": PER_TOKEN},
        "frozen": {"algorithm": ALGORITHM, "clip_grad": CLIP, "weight_decay": 0.1, "freeze_params_name_list": FROZEN},
        "loss of sequences": {"algorithm": SEQUENCES, "clip_grad": CLIP},
        "recomputed": {"algorithm": ALGORITHM, "gradient_checkpointing": True},
        "bfloat16": {"algorithm": ALGORITHM, "dtype": "bfloat16"},
        **{name: {"algorithm": algorithm} for name, algorithm in ALGORITHMS.items()},
    }
    for name, options in variants.items():
        variant = make_engine(folder, max_tokens_per_gpu=120, adam_eps=EPS, teacher=folder, **options, **ranks)
        report[name] = variant.train(BATCH, num_steps=2, expected_version=0, input_digest="d").metrics
        if options["algorithm"].learns_from_top_k:
            report["teacher's rows"] = [rows.tolist() for rows in variant.score(BATCH, "teacher")]
        if name == "loss of sequences":
            report["weights after it"] = {name: tensor.tolist() for name, tensor in weights_of(variant).items()}
        if name == "frozen":
            report["frozen weights"] = {name: tensor.tolist() for name, tensor in weights_of(variant).items()}
    if (work / "store" / "ranks-1").is_dir():
        engine.load(store, "ranks-1")
        report["digest loaded from one rank"] = engine.position().state_digest
    return report


def launched(rank: int, world_size: int, folder: Path, work: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=world_size)
    report = run_cases(folder, work, rank, world_size)
    (work / f"report-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
