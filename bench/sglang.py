"""Cairn's SGLang engine against a bare client of the same server, and the startup time of a server.

    python -m bench.sglang [--hidden 64 512] [--samples 16 64 256] [--rounds 5] [--starts 2] [--smoke] [--json FILE]

Tiny Qwen3 models (2 layers), prompts of 16 to 47 tokens in groups of 8 samples, 64 new tokens each, log-probs on. Both
sides send one `/generate` request a sample, all concurrently, and alternate on one server; the first turn of each is
not counted. The bare client only parses the JSON of a response and counts its tokens; the engine checks every request
and converts the responses into arrays. Speeds are response tokens per wall-clock second. The CPU time is that of the
client process alone, without the server's.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import transformers
from rich.console import Console
from rich.table import Table

from bench.command import parse, say
from bench.rollout import GROUP_SIZE, NEW_TOKENS, VOCAB_SIZE, build_model
from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.types.types import GenerateRequest, SamplingParams

START_TIMEOUT = 600.0


def make_requests(samples: int) -> list[GenerateRequest]:
    """Return requests for groups with `samples` samples in all, none of which ends before its last token."""
    draw = np.random.default_rng(samples)
    requests = []
    for number in range(samples // GROUP_SIZE):
        prompt = draw.integers(VOCAB_SIZE, size=draw.integers(16, 48)).tolist()
        seeds = draw.integers(2**31, size=GROUP_SIZE).tolist()
        params = SamplingParams(NEW_TOKENS)
        requests += [GenerateRequest((number, i), prompt, seed, params) for i, seed in enumerate(seeds)]
    return requests


def run_engine(engine: SGLangEngine, requests: Sequence[GenerateRequest]) -> int:
    """Generate all samples; return the number of response tokens."""
    return sum(len(sample.response_ids) for samples in engine.generate(requests) for sample in samples)


def run_client(url: str, requests: Sequence[GenerateRequest]) -> int:
    """Generate all samples with the bare client; return the number of response tokens."""

    async def sample(http: aiohttp.ClientSession, body: dict[str, Any]) -> int:
        async with http.post("/generate", json=body) as reply:
            return len((await reply.json())["output_ids"])

    async def all_samples() -> int:
        bodies = [
            {
                "input_ids": list(request.input_ids),
                "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 1.0},
                "return_logprob": True,
            }
            for request in requests
        ]
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http:
            return sum(await asyncio.gather(*(sample(http, body) for body in bodies)))

    return asyncio.run(all_samples())


def start(path: Path, log: Path) -> tuple[SGLangEngine, float]:
    """Start an engine; return it, and the seconds until its server served."""
    config = RolloutConfig(
        num_rollout=1,
        rollout_batch_size=1,
        rollout_max_response_len=NEW_TOKENS,
        max_running_requests=64,
        sglang={"max_total_tokens": 16384},
    )
    say("starting a server")
    began = time.monotonic()
    engine = SGLangEngine(str(path), config, "cpu", log, START_TIMEOUT)
    return engine, time.monotonic() - began


def measure(engine: SGLangEngine, samples: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return tokens per wall-clock second, and the client's CPU milliseconds a sample, of every counted turn."""
    requests = make_requests(samples)
    sides: dict[str, Callable[[], int]] = {
        "engine": lambda: run_engine(engine, requests),
        "client": lambda: run_client(engine.server.url, requests),
    }
    found: dict[str, dict[str, list[float]]] = {side: {"tokens/s": [], "cpu ms": []} for side in sides}
    for turn in range(rounds + 1):
        for side in list(sides) if turn % 2 else reversed(sides):
            began, cpu = time.perf_counter(), time.process_time()
            tokens = sides[side]()
            if turn:
                found[side]["tokens/s"].append(tokens / (time.perf_counter() - began))
                found[side]["cpu ms"].append(1000 * (time.process_time() - cpu) / samples)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512], help="hidden sizes of the models")
    parser.add_argument("--samples", type=int, nargs="+", default=[16, 64, 256], help="samples per call")
    parser.add_argument("--rounds", type=int, default=5, help="counted turns of each side")
    parser.add_argument("--starts", type=int, default=2, help="servers started for each model")
    arguments = parse(parser, hidden=[64], samples=[16], rounds=1, starts=1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results, starts = [], []
    table = Table("hidden", "samples", "engine tok/s", "bare client tok/s", "ratio", "engine CPU ms", "client CPU ms")
    for hidden in arguments.hidden:
        with tempfile.TemporaryDirectory() as folder:
            path = build_model(hidden, Path(folder, "model"))
            for _ in range(arguments.starts - 1):
                engine, seconds = start(path, Path(folder, "server.log"))
                starts.append(seconds)
                engine.close()
            engine, seconds = start(path, Path(folder, "server.log"))
            starts.append(seconds)
            for samples in arguments.samples:
                say(f"hidden {hidden}, {samples} samples")
                found = measure(engine, samples, arguments.rounds)
                results.append({"hidden": hidden, "samples": samples, **found})
                own, bare = found["engine"]["tokens/s"], found["client"]["tokens/s"]
                ratio = statistics.median(a / b for a, b in zip(own, bare, strict=True))
                speeds = [f"{statistics.median(values):,.0f}" for values in (own, bare)]
                cpu = [f"{statistics.median(found[side]['cpu ms']):.2f}" for side in found]
                table.add_row(str(hidden), str(samples), *speeds, f"{ratio:.3f}", *cpu)
            engine.close()
    console = Console()
    console.print(table)
    console.print(f"seconds until a server serves: {', '.join(f'{seconds:.1f}' for seconds in starts)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"results": results, "start_seconds": starts}, indent=1))


if __name__ == "__main__":
    main()
