"""Speed of the transformers rollout engine against `transformers.generate`, both with log-probs, on one CPU thread.

    python bench/rollout.py [--hidden 64 512] [--batch 8 64 256] [--rounds 3] [--smoke] [--json FILE]

Tiny Qwen3 models (2 layers; hidden 64 has 123k parameters), prompts of 16 to 47 tokens, up to 64 new ones, temperature
1. Two workloads:
  fixed   one batch with a different prompt for each sample, all of which run to 64 tokens: decoding alone.
  groups  two batches of 8 samples a prompt, where 1 token in 50 ends a response: a rollout of GRPO. `generate` is
          called once a batch; the engine gets all requests and runs as many samples concurrently.

Both sides generate the same kind of samples from the same prompts, in one process, alternating; the first turn of each
is not counted. Speeds are tokens of responses per CPU second, the median of the rounds. On an idle machine CPU time
equals wall-clock time; on a shared one it is more stable.

`limit` is an upper bound for `fixed` from the matrices of the model's linear layers, measured in the same turns. A
decoding step reads all of them once, as a product with one row does, and multiplies them by a row for each sample, at
the rate of products with many rows; it takes as long as the longer of the two. The same holds for the prefill of a
prompt, by its rows. `products` is the speed of PyTorch's products alone with as many rows as there are samples. Neither
includes attention, norms and sampling.
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
from typing import Any, cast

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bench.command import parse, say
from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.types import GenerateRequest, SamplingParams

VOCAB_SIZE = 384
NEW_TOKENS = 64
GROUP_SIZE = 8
STOP_SHARE = 50
MANY_ROWS = 512
"""Number of rows of a product whose time is limited by its arithmetic."""


@dataclass(frozen=True)
class Result:
    """Tokens of responses per CPU second."""

    workload: str
    hidden_size: int
    batch_size: int
    generate: float
    engine: float
    speedup: float
    """Median over the rounds of the ratio of both sides."""
    of_limit: float | None
    """Median ratio of the engine to the limit; None where the number of samples in a step is unknown."""
    of_products: float | None
    """Median ratio of the engine to PyTorch's products alone."""


def build_model(hidden_size: int, folder: Path) -> Path:
    """Save a Qwen3 model with random weights, large enough that its distributions are not flat."""
    torch.manual_seed(0)
    head_dim = 16 if hidden_size < 512 else 64
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=hidden_size // head_dim,
        num_key_value_heads=hidden_size // head_dim // 2,
        head_dim=head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_requests(workload: str, batch_size: int) -> list[GenerateRequest]:
    """Return the requests of a workload."""
    draw = np.random.default_rng(batch_size)
    samples = GROUP_SIZE if workload == "groups" else 1
    stops = tuple(range(0, VOCAB_SIZE, STOP_SHARE)) if workload == "groups" else ()
    count = 2 * batch_size // GROUP_SIZE if workload == "groups" else batch_size
    params = SamplingParams(NEW_TOKENS, stop_token_ids=stops)
    requests = []
    for number in range(count):
        prompt = draw.integers(VOCAB_SIZE, size=draw.integers(16, 48)).tolist()
        seeds = draw.integers(2**63, size=samples).tolist()
        requests += [GenerateRequest((number, i), prompt, seed, params) for i, seed in enumerate(seeds)]
    return requests


def run_engine(engine: TransformersEngine, requests: list[GenerateRequest]) -> int:
    """Generate all samples; return the number of response tokens."""
    return sum(len(sample.response_ids) for samples in engine.generate(requests) for sample in samples)


@torch.inference_mode()
def run_generate(model: PreTrainedModel, requests: list[GenerateRequest]) -> int:
    """Generate all samples through `generate`, with left padding, and log-probs gathered from its logits; return the
    number of response tokens."""
    params = requests[0].sampling_params
    prompts = [list(request.input_ids) for request in requests]
    width = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    attention_mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = cast(Any, model).generate(
        input_ids,
        attention_mask=attention_mask,
        generation_config=GenerationConfig(
            max_new_tokens=params.max_new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            eos_token_id=list(params.stop_token_ids) or None,
            return_dict_in_generate=True,
            output_logits=True,
        ),
    )
    responses = output.sequences[:, width:]
    logits = torch.stack(output.logits, dim=1)
    log_probs = torch.log_softmax(logits, -1).gather(-1, responses[..., None])[..., 0]
    stops = torch.isin(responses, torch.tensor(params.stop_token_ids, dtype=torch.int64))
    before = stops.cumsum(1) - stops.long()
    return sum(len(row) for row in (row[keep] for row, keep in zip(log_probs, before == 0, strict=True)))


@torch.inference_mode()
def seconds_of_products(model: PreTrainedModel, rows: int) -> float:
    """Return the CPU seconds of multiplying the matrices of all linear layers by `rows` rows, one after the other."""
    weights = [layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    inputs = [torch.randn(rows, weight.shape[1]) for weight in weights]
    start = time.process_time()
    for data, weight in zip(inputs, weights, strict=True):
        torch.nn.functional.linear(data, weight)
    return time.process_time() - start


def limits_of(model: PreTrainedModel, requests: list[GenerateRequest]) -> tuple[float, float]:
    """Return two speeds for samples that are all decoded together, in response tokens per CPU second: an upper bound
    for any engine, and the speed of the products alone."""
    count, prompt_tokens = len(requests), sum(len(request.input_ids) for request in requests)
    read, together = (statistics.median(seconds_of_products(model, rows) for _ in range(30)) for rows in (1, count))
    multiply = statistics.median(seconds_of_products(model, MANY_ROWS) for _ in range(5)) / MANY_ROWS
    prompts = max(read, multiply * prompt_tokens)  # a pass that gives the first token, too
    limit, products = (
        NEW_TOKENS * count / (prompts + (NEW_TOKENS - 1) * step) for step in (max(read, multiply * count), together)
    )
    return limit, products


def measure(model: PreTrainedModel, path: Path, workload: str, batch_size: int, rounds: int) -> Result:
    """Measure both sides, alternating, on one workload."""
    config = RolloutConfig(
        num_rollout=1, rollout_batch_size=1, rollout_max_response_len=NEW_TOKENS, max_running_requests=batch_size
    )
    engine = TransformersEngine(str(path), config)
    requests = make_requests(workload, batch_size)
    calls = [requests[i : i + batch_size] for i in range(0, len(requests), batch_size)]
    sides: dict[str, Callable[[], int]] = {
        "generate": lambda: sum(run_generate(model, call) for call in calls),
        "engine": lambda: run_engine(engine, requests),
    }
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    limits: list[tuple[float, float]] = []
    for turn in range(rounds + 1):
        for side, run in sides.items():
            start = time.process_time()
            tokens = run()
            if turn:
                speeds[side].append(tokens / (time.process_time() - start))
        if turn and workload == "fixed":
            limits.append(limits_of(model, requests))
    ratios = [own / reference for own, reference in zip(speeds["engine"], speeds["generate"], strict=True)]
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    shares = [
        statistics.median(own / limit for own, limit in zip(speeds["engine"], each, strict=True))
        for each in zip(*limits, strict=True)
    ]
    return Result(
        workload,
        model.config.hidden_size,
        batch_size,
        **medians,
        speedup=statistics.median(ratios),
        of_limit=shares[0] if shares else None,
        of_products=shares[1] if shares else None,
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512], help="hidden sizes of the models")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64, 256], help="samples per call")
    parser.add_argument("--rounds", type=int, default=3, help="counted turns of each side")
    args = parse(parser, hidden=[64], batch=[8], rounds=1)

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = []
    table = Table(
        "workload", "hidden", "batch", "generate tok/s", "engine tok/s", "speed-up", "of limit", "of products"
    )
    for hidden_size in args.hidden:
        with tempfile.TemporaryDirectory() as folder:
            path = build_model(hidden_size, Path(folder))
            model = Qwen3ForCausalLM.from_pretrained(path).eval()
            for workload in ("fixed", "groups"):
                for batch_size in args.batch:
                    say(f"hidden {hidden_size}, {workload}, batch {batch_size}")
                    result = measure(model, path, workload, batch_size, args.rounds)
                    results.append(result)
                    numbers = f"{result.generate:,.0f}", f"{result.engine:,.0f}", f"{result.speedup:.2f}"
                    shares = map(_share, (result.of_limit, result.of_products))
                    table.add_row(workload, str(hidden_size), str(batch_size), *numbers, *shares)
    Console().print(table)
    if args.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions["transformers"] = transformers.__version__
        report = {"versions": versions, "threads": 1, "results": [asdict(result) for result in results]}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
