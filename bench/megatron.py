"""Time of one training step through the Megatron engine, the torch engine, and a bare loop around megatron-core.

    python -m bench.megatron [--hidden 128] [--layers 4] [--rounds 7] [--json results.json]

One optimizer step of GRPO on 64 samples with prompts of 18 to 27 tokens and responses of 4 to 128, in float32 on one
rank and one CPU thread, on a tiny Qwen3 model. The bare loop calls Megatron's schedule, clipping and optimizer on the
very micro-batches and loss of the engine, and does nothing else: what the engine takes above it are its checks, its
metrics and the digest of the state. The variants take turns in one process; the first turn of each is not counted.
Times are CPU seconds, the median of the rounds.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from configs.schema.algorithm import AlgorithmConfig
from configs.schema.run import ModelConfig
from configs.schema.training import TrainingConfig
from engines.training.batching import plan_micro_batches
from engines.training.factory import make_engine
from engines.training.losses.aggregate import token_weights
from engines.types import TrainBatch

SAMPLES, VOCABULARY, MAX_TOKENS = 64, 384, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    batch = make_batch()
    with tempfile.TemporaryDirectory() as folder:
        build_model(options.hidden, options.layers, folder)
        variants = {
            "bare Megatron loop": bare_loop(folder, batch),
            "megatron engine": engine_step("megatron", folder, batch),
            "torch engine": engine_step("torch", folder, batch),
        }
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(options.rounds + 1):
            for name, step in variants.items():
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
    """Megatron's own pieces in a loop of a few lines."""
    from engines.training.megatron.backend import backend_for
    from engines.training.process import join_process_group, prepare_process

    config, algorithm, device = training("megatron"), AlgorithmConfig(), torch.device("cpu")
    backend = backend_for(device)
    prepare_process(config, device)
    join_process_group(1)
    from engines.training.megatron.model import build_optimizer, join_groups, load_model, wrap
    from engines.training.megatron.passes import Passes
    from engines.training.megatron.vocabulary import Policy

    join_groups(config)
    model = load_model(Path(folder), config, backend)
    chunks = wrap(model, config)
    optimizer = build_optimizer(config, model, chunks)
    passes = Passes(model.config, chunks, device)
    objective = partial(Policy(model.vocabulary, 1.0).objective, algorithm=algorithm)
    (plan,) = plan_micro_batches({i: len(ids) for i, ids in enumerate(batch.input_ids)}, MAX_TOKENS)
    shares = token_weights([int(mask.sum()) for mask in batch.loss_mask], per_token=False)
    weights = dict(enumerate(shares))

    def step() -> None:
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        passes.accumulate_gradients(batch, plan, weights, objective)
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
