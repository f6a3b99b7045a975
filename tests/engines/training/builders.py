"""Tiny models, batches and engines."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.torch.engine import TorchEngine
from cairn.engines.types.batches import BatchOutline
from cairn.engines.types.types import Completion, SamplingSupport, TrainBatch

VOCABULARY = 321  # odd: it does not divide evenly over ranks

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}


EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Llama 3.1's, whose scaling changes the slow half of the frequencies."""


def tiny_model(family: str = "qwen3", seed: int = 0, layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {**SIZES, "num_hidden_layers": layers}
    if family == "glm4":
        return Glm4ForCausalLM(
            Glm4Config(**sizes, **GROUPED, tie_word_embeddings=False, pad_token_id=0, partial_rotary_factor=0.5)
        )
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2, tie_word_embeddings=True))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, **GROUPED, tie_word_embeddings=True))
    if family.startswith("qwen3_moe"):
        experts = {**EXPERTS, "norm_topk_prob": family == "qwen3_moe"}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **GROUPED, **experts, mlp_only_layers=[1]))
    if family in ("llama", "llama3.1"):
        scaled: dict[str, Any] = {"rope_parameters": ROPE} if family == "llama3.1" else {}
        return LlamaForCausalLM(LlamaConfig(**sizes, **GROUPED, **scaled, tie_word_embeddings=False))
    if family == "gpt_neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, hidden_dropout=0.5, attention_dropout=0.5))
    if family == "gemma2":
        return Gemma2ForCausalLM(Gemma2Config(**SIZES, **GROUPED, final_logit_softcapping=2.0, sliding_window=16))
    raise ValueError(family)


def model_folder(path: Path, family: str = "qwen3", seed: int = 0, layers: int = 2) -> Path:
    tiny_model(family, seed, layers).save_pretrained(path)
    return path


def make_engine(
    folder: Path,
    *,
    algorithm: AlgorithmConfig | None = None,
    temperature: float = 1.0,
    total_steps: int = 100,
    ref: Path | None = None,
    teacher: Path | None = None,
    rank: int = 0,
    world_size: int = 1,
    device: str = "cpu",
    **training: Any,
) -> TorchEngine:
    return TorchEngine(
        ModelConfig(
            path=str(folder), ref_path=str(ref) if ref else None, teacher_path=str(teacher) if teacher else None
        ),
        TrainingConfig(**{"lr": 1e-3, "num_threads": 1, "world_size": world_size, **training}),
        algorithm or AlgorithmConfig(),
        temperature=temperature,
        total_steps=total_steps,
        rank=rank,
        world_size=world_size,
        device=device,
    )


def part_of(batch: TrainBatch, samples: slice) -> TrainBatch:
    """Some of a batch's samples."""
    columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return TrainBatch(**{name: None if column is None else column[samples] for name, column in columns.items()})


def make_batch(count: int = 12, seed: int = 0, **fields: bool) -> TrainBatch:
    """Samples of skewed lengths with masks that have holes; `old`, `rollout` and `ref` ask for those log-probs."""
    draw = np.random.default_rng(seed)
    prompts = draw.integers(3, 12, count)
    responses = np.minimum(60, draw.exponential(12, count).astype(int) + 2)

    def log_probs(wanted: bool) -> list[np.ndarray] | None:
        # Near the log-probs of a freshly initialised model, so that ratios fall on both sides of the clip range.
        return [draw.normal(-5.8, 0.4, n).astype(np.float32) for n in responses] if wanted else None

    def numbers() -> list[np.ndarray]:
        return [draw.normal(size=n).astype(np.float32) for n in responses]

    masks = [(draw.random(n) < 0.8).astype(np.uint8) for n in responses]
    for mask in masks:
        mask[-1] = 1
    return TrainBatch(
        input_ids=[
            draw.integers(0, VOCABULARY, p + r).astype(np.int32) for p, r in zip(prompts, responses, strict=True)
        ],
        response_lengths=responses.tolist(),
        loss_mask=masks,
        advantages=[np.full(n, draw.normal(), np.float32) for n in responses],
        old_log_probs=log_probs(fields.get("old", False)),
        rollout_log_probs=log_probs(fields.get("rollout", False)),
        ref_log_probs=log_probs(fields.get("ref", False)),
        values=numbers(),
        returns=numbers(),
    )


def cut_vocabulary(batch: TrainBatch, seed: int = 0) -> TrainBatch:
    """The same samples as if two tokens in three had been drawn from a part of the vocabulary, with log-probs near
    those of a freshly initialised model within it."""
    draw = np.random.default_rng(seed)

    def part(token: int) -> np.ndarray:
        if draw.random() > 2 / 3:
            return np.zeros(0, np.int32)
        return np.union1d(draw.choice(VOCABULARY, draw.integers(1, 200), replace=False), token)

    pairs = zip(batch.input_ids, batch.response_lengths, strict=True)
    supports = [SamplingSupport.of([part(token) for token in ids[len(ids) - length :]]) for ids, length in pairs]
    counts = [np.where(tokens.counts, tokens.counts, VOCABULARY) for tokens in supports]
    shifts = [np.log(VOCABULARY / count).astype(np.float32) for count in counts]
    fields = {
        name: [values + shift for values, shift in zip(field, shifts, strict=True)]
        for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs")
        if (field := getattr(batch, name)) is not None
    }
    return replace(batch, kept=supports, **fields)


def with_top_tokens(batch: TrainBatch, k: int, seed: int = 0) -> TrainBatch:
    """A batch with the k most probable tokens of a teacher, drawn from the whole vocabulary, which hold nine tenths of
    its mass."""
    draw = np.random.default_rng(seed)
    return replace(
        batch,
        teacher_top_log_probs=[
            np.log(0.9 * draw.dirichlet(np.ones(k), n)).astype(np.float32) for n in batch.response_lengths
        ],
        teacher_top_ids=[
            np.argsort(draw.random((n, VOCABULARY)), -1)[:, :k].astype(np.int32) for n in batch.response_lengths
        ],
    )


def routed(batch: TrainBatch, layers: int, experts: int, top_k: int, seed: int = 0) -> TrainBatch:
    """The same samples as if most of them had been read by a mixture of experts that chose at random."""
    draw = np.random.default_rng(seed)

    def choices(tokens: int) -> np.ndarray:
        return np.argsort(draw.random((tokens, layers, experts)), -1)[..., :top_k].astype(np.uint8)

    return replace(
        batch, routed_experts=[choices(len(ids) - 1) if i % 5 else None for i, ids in enumerate(batch.input_ids)]
    )


def sampled_tokens(
    prompts: Sequence[Sequence[int]], done: Sequence[Completion], draw: np.random.Generator
) -> TrainBatch:
    """What a rollout engine answered to prompts, whose places the requests have as their groups, with an advantage
    drawn for each sample."""
    return TrainBatch(
        input_ids=[np.concatenate([prompts[c.request_id[0]], c.response_ids]).astype(np.int32) for c in done],
        response_lengths=[len(c.response_ids) for c in done],
        loss_mask=[np.ones(len(c.response_ids), np.uint8) for c in done],
        advantages=[np.full(len(c.response_ids), draw.normal(), np.float32) for c in done],
        rollout_log_probs=[c.log_probs for c in done],
    )


def weights_of(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in engine.export_weights(1 << 30) for name, tensor in bucket.items()}


@dataclass(frozen=True)
class InParts:
    """A source and a reader of a batch that lies in parts: part p has every sequence p + n · parts."""

    whole: TrainBatch
    parts: int

    def reader(self) -> "InParts":
        return self

    def sizes(self, part: int) -> BatchOutline:
        return BatchOutline.of(self.whole)

    def outline(self, sizes: Sequence[BatchOutline]) -> BatchOutline:
        return sizes[-1]

    def rows(self, part: int, wanted: Sequence[Collection[int]]) -> list[dict[int, dict[str, Any]]]:
        sequences = range(part, len(self.whole), self.parts)
        return [{i: self._row(i) for i in sequences if i in own} for own in wanted]

    def batch(self, rows: Sequence[dict[int, dict[str, Any]]], own: Collection[int]) -> TrainBatch:
        held = {i: row for part in rows for i, row in part.items()}
        assert held.keys() == {*own}
        lists = {
            name: [held[i][name] if i in held else None for i in range(len(self.whole))] for name in self._per_row()
        }
        return replace(self.whole, **lists)

    def _per_row(self) -> list[str]:
        shared = ("response_lengths", "groups", "samples")
        names = [field.name for field in fields(self.whole) if field.name not in shared]
        return [name for name in names if isinstance(getattr(self.whole, name), list)]

    def _row(self, sequence: int) -> dict[str, Any]:
        return {name: getattr(self.whole, name)[sequence] for name in self._per_row()}


class Kept:
    """A writer of scores that returns them."""

    def write(self, reader: Any, batch: TrainBatch, scores: Any) -> Any:
        return scores
