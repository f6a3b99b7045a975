"""Time of one training step through the Megatron engine, the torch engine, and a bare loop around megatron-core.

    python -m bench.megatron [--hidden 128] [--layers 4] [--rounds 7] [--smoke] [--json FILE]

One optimizer step of GRPO on 64 samples with prompts of 18 to 27 tokens and responses of 4 to 128, in float32 on one
rank and one CPU thread, on a tiny Qwen3 model. The bare loop calls Megatron's schedule, clipping and optimizer on the
samples of the engine's micro-batches, packed before the first step, and computes only the loss. The engine's additional
time is packing, checks, metrics (including the entropy of every token) and the digest of the state. The variants
alternate in one process; the first turn of each is not counted. Times are CPU seconds, the median of the rounds.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.command import parse, say
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.batching import pack_micro_batches
from cairn.engines.training.factory import make_engine
from cairn.engines.types.types import TrainBatch

SAMPLES, VOCABULARY, MAX_TOKENS = 64, 384, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    options = parse(parser, hidden=64, layers=2, rounds=1)
    batch = make_batch()
    with tempfile.TemporaryDirectory() as folder:
        build_model(options.hidden, options.layers, folder)
        variants = {
            "bare Megatron loop": bare_loop(folder, batch),
            "megatron engine": engine_step("megatron", folder, batch),
            "torch engine": engine_step("torch", folder, batch),
        }
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(options.rounds + 1):
            for name, step in variants.items():
                say(f"{name}: turn {turn} of {options.rounds}")
                started = time.process_time()
                step()
                seconds[name].append(time.process_time() - started)
    median = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    bare = median["bare Megatron loop"]
    table = Table("variant", "CPU seconds a step", "of the bare loop's")
    for name, value in median.items():
        table.add_row(name, f"{value:.3f}", f"{value / bare:.2f}")
    Console().print(table)
    if options.json is not None:
        result = {"seconds": median, "over_bare": {name: value / bare for name, value in median.items()}}
        options.json.write_text(json.dumps({**vars(options), "json": None, **result}, indent=1) + "\n")


def build_model(hidden: int, layers: int, folder: str) -> None:
    torch.manual_seed(0)
    heads = hidden // 16
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_batch() -> TrainBatch:
    draw = np.random.default_rng(0)
    prompts = draw.integers(18, 28, SAMPLES)
    responses = np.clip(draw.exponential(28, SAMPLES).astype(int), 4, 128)
    return TrainBatch(
        input_ids=[
            draw.integers(0, VOCABULARY, p + r).astype(np.int32) for p, r in zip(prompts, responses, strict=True)
        ],
        response_lengths=responses.tolist(),
        loss_mask=[np.ones(n, np.uint8) for n in responses],
        advantages=[np.full(n, draw.normal(), np.float32) for n in responses],
    )


def training(engine: str) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {"engine": engine, "lr": 1e-4, "num_threads": 1, "max_tokens_per_gpu": MAX_TOKENS}
    )


def engine_step(engine: str, folder: str, batch: TrainBatch) -> Callable[[], Any]:
    made = make_engine(ModelConfig(path=folder), training(engine), AlgorithmConfig(), temperature=1.0, total_steps=1000)
    version = 0

    def step() -> None:
        nonlocal version
        made.train(batch, num_steps=1, expected_version=version, input_digest="bench")
        version += 1

    return step


def bare_loop(folder: str, batch: TrainBatch) -> Callable[[], Any]:
    """Return a step of a minimal loop around Megatron's own functions, over micro-batches that were packed
    beforehand."""
    from cairn.engines.training.megatron.backend import backend_for
    from cairn.engines.training.process import join_process_group, prepare_process

    config, device = training("megatron"), torch.device("cpu")
    backend = backend_for(device)
    prepare_process(config, device)
    join_process_group(1)
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from cairn.engines.training.megatron.model import build_optimizer, join_groups, load_model, wrap

    join_groups(config)
    model = load_model(Path(folder), config, backend)
    (chunk,) = wrap(model, config)
    optimizer = build_optimizer(config, model, [chunk])
    (plan,) = pack_micro_batches({i: len(ids) for i, ids in enumerate(batch.input_ids)}, MAX_TOKENS, 1)
    packed = [packed_samples(batch, micro_batch.samples) for micro_batch in plan]

    def forward_step(data: Iterator[tuple[torch.Tensor, ...]], model: Any) -> Any:
        input_ids, ends, places, targets, weights = next(data)
        longest = int(ends.diff().max())
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        lengths = dict.fromkeys(names, ends) | {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        logits = model(input_ids, None, None, packed_seq_params=PackedSeqParams(qkv_format="thd", **lengths))

        def loss_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            log_probs = -vocab_parallel_cross_entropy(logits[0, places].float(), targets)
            loss = -(weights * (log_probs - log_probs.detach()).exp()).sum()
            return loss, torch.zeros((), dtype=torch.int), {}

        return logits, loss_of

    def step() -> None:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(packed),
            model=chunk,
            num_microbatches=len(packed),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()

    return step


def packed_samples(batch: TrainBatch, samples: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return concatenated samples: tokens [1, T], boundaries of samples [B + 1], positions that predict response tokens
    [N], these tokens [N], and their advantages divided by the loss's counts [N]."""
    assert batch.advantages is not None
    rows = [batch.input_ids[i] for i in samples]
    ends = np.cumsum([0, *map(len, rows)])
    responses = [batch.response_lengths[i] for i in samples]
    places = [np.arange(end - count - 1, end - 1) for end, count in zip(ends[1:], responses, strict=True)]
    weights = [batch.advantages[i] / (len(batch) * batch.response_lengths[i]) for i in samples]
    targets = [row[-count:] for row, count in zip(rows, responses, strict=True)]
    return (
        torch.from_numpy(np.concatenate(rows)).long()[None],
        torch.from_numpy(ends).int(),
        torch.from_numpy(np.concatenate(places)),
        torch.from_numpy(np.concatenate(targets)).long(),
        torch.from_numpy(np.concatenate(weights)),
    )


if __name__ == "__main__":
    main()
