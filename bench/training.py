"""Time and memory of one training step on samples of skewed lengths: in one micro-batch and in smaller ones, on padded
and on packed rows, and the share of the state digest.

    python -m bench.training [--hidden 64 512] [--max-tokens 2048 4096 8192] [--rounds 5] [--smoke] [--json FILE]

One optimizer step of GRPO on 256 samples with prompts of 18 to 27 tokens and responses of 4 to 128 (exponential, mean
28), through the torch engine in float32, on tiny Qwen3 models (2 layers; hidden 64 has 123k parameters) and one CPU
thread. The variants alternate in one process; the first turn of each is not counted. Times are CPU seconds, the median
of the rounds. On an idle machine CPU time equals wall-clock time; on a shared one it is more stable. Memory is what a
further step allocates at most, beside weights and optimizer state.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3ForCausalLM

from bench.command import parse, say
from bench.rollout import VOCAB_SIZE, build_model
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.sharding import state_digest
from cairn.engines.training.torch.engine import TorchEngine
from cairn.engines.types.types import TrainBatch
from tests.flows.plan.measured import highest

SAMPLES = 256


@dataclass(frozen=True)
class Result:
    """A variant of the step on one model."""

    hidden_size: int
    parameters: int
    max_tokens_per_gpu: int | None
    """Token limit of a micro-batch; None: one micro-batch for all samples."""
    packed: bool
    """Whether samples share a row, in place of a padded row each."""
    seconds: float
    tokens_per_second: float
    """Tokens of prompts and responses per second, without padding."""
    speedup: float
    """Speedup over one padded micro-batch, median over the rounds."""
    peak_bytes: int
    """Most memory that a step allocates."""
    digest_share: float
    """Share of the digest in the step's time."""


def make_batch() -> TrainBatch:
    """Return the samples."""
    draw = np.random.default_rng(0)
    prompts = draw.integers(18, 28, SAMPLES)
    responses = np.minimum(128, draw.exponential(24, SAMPLES).astype(int) + 4)
    return TrainBatch(
        input_ids=[
            draw.integers(VOCAB_SIZE, size=p + r).astype(np.int32) for p, r in zip(prompts, responses, strict=True)
        ],
        response_lengths=responses.tolist(),
        loss_mask=[np.ones(length, np.uint8) for length in responses],
        advantages=[np.full(length, draw.normal(), np.float32) for length in responses],
        old_log_probs=[np.full(length, -6.0, np.float32) for length in responses],
    )


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(folder: str, budgets: list[int | None], rounds: int) -> list[Result]:
    """Measure the variants, and the digest of a state of the same size, alternating."""
    batch = make_batch()
    variants = [(budget, packed) for budget in budgets for packed in (False, True)]
    engines = {
        (budget, packed): TorchEngine(
            ModelConfig(path=folder),
            TrainingConfig(lr=1e-4, num_threads=1, max_tokens_per_gpu=budget, sequence_packing=packed),
            AlgorithmConfig(),
            temperature=1.0,
            total_steps=rounds + 2,
        )
        for budget, packed in variants
    }
    model = Qwen3ForCausalLM.from_pretrained(folder)
    parameters = model.num_parameters()
    state = [
        (f"{kind}.{name}", p)
        for kind in ("parameters", "exp_avg", "exp_avg_sq")
        for name, p in model.named_parameters()
    ]
    steps: dict[tuple[int | None, bool], list[float]] = {variant: [] for variant in variants}
    digests = []
    for turn in range(rounds + 1):
        for variant, engine in engines.items():
            seconds = cpu_seconds(
                lambda engine=engine, turn=turn: engine.train(  # type: ignore[misc]
                    batch, num_steps=1, expected_version=turn, input_digest=str(turn)
                )
            )
            say(
                f"{parameters:,} parameters, max tokens, packed {variant}: turn {turn} of {rounds}, {seconds:.1f} CPU s"
            )
            if turn:
                steps[variant].append(seconds)
        seconds = cpu_seconds(lambda turn=turn: state_digest(state, turn, world_size=1))  # type: ignore[misc]
        if turn:
            digests.append(seconds)
    peaks: dict[tuple[int | None, bool], int] = {}
    for variant, engine in engines.items():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            engine.train(batch, num_steps=1, expected_version=rounds + 1, input_digest="memory")
        peaks[variant] = highest(profiled)
    tokens = sum(map(len, batch.input_ids))
    return [
        Result(
            hidden_size=model.config.hidden_size,
            parameters=parameters,
            max_tokens_per_gpu=budget,
            packed=packed,
            seconds=statistics.median(times),
            tokens_per_second=tokens / statistics.median(times),
            speedup=statistics.median(whole / own for whole, own in zip(steps[None, False], times, strict=True)),
            peak_bytes=peaks[budget, packed],
            digest_share=statistics.median(digests) / statistics.median(times),
        )
        for (budget, packed), times in steps.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512], help="hidden sizes of the models")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[2048, 4096, 8192], help="max_tokens_per_gpu")
    parser.add_argument("--rounds", type=int, default=5, help="counted turns of each variant")
    args = parse(parser, hidden=[64], max_tokens=[4096], rounds=1)

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results: list[Result] = []
    table = Table("hidden", "parameters", "max tokens", "rows", "s / step", "tokens/s", "speed-up", "peak MB", "digest")
    for hidden_size in args.hidden:
        with tempfile.TemporaryDirectory() as folder:
            build_model(hidden_size, Path(folder))
            results += measure(folder, [None, *args.max_tokens], args.rounds)
    for result in results:
        table.add_row(
            str(result.hidden_size),
            f"{result.parameters:,}",
            str(result.max_tokens_per_gpu or "no limit"),
            "packed" if result.packed else "padded",
            f"{result.seconds:.3f}",
            f"{result.tokens_per_second:,.0f}",
            f"{result.speedup:.2f}",
            f"{result.peak_bytes / 1e6:,.0f}",
            f"{result.digest_share:.2%}",
        )
    Console().print(table)
    if args.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions["transformers"] = transformers.__version__
        report = {"versions": versions, "threads": 1, "results": [asdict(result) for result in results]}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
