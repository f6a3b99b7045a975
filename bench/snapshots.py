"""Size and speed of snapshots: a sample's rollout, reward and advantage rows as committed Parquet.

    python -m bench.snapshots [--samples 2048] [--tokens 512] [--routed 48 8 128] [--smoke] [--json FILE]

Token ids are drawn from a Zipf distribution over 151,000 words, log-probs from an exponential one, and texts from
twenty words. The dominant columns, the ids and the float32 log-probs, compress no better than those of a language
model. Experts are drawn in each layer by a popularity of its own. They are written through the storage layer to a
temporary folder, fsync included; the rollout's rows also as one part of the write-ahead log. Speeds are the best of
three, in tokens per CPU second of all threads.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from bench.command import parse
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import ADVANTAGE, REWARD, ROLLOUT, rollout_schema
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.logs.parts import part_bytes
from cairn.storage.opening import open_store

TEXT = "the sum is so we get answer therefore let x = 12 7 + find each cost total of apples"
WORDS = TEXT.split(" ")
GROUP = 8


def experts(draw: np.random.Generator, tokens: int, layers: int, top_k: int, number: int) -> dict[str, Any]:
    """Return the `routed_experts` of one sample."""
    popularity = draw.normal(size=(layers, number)).astype(np.float32)
    scores = popularity - np.log(draw.standard_exponential((tokens, layers, number)) + 1e-9, dtype=np.float32)
    chosen = np.argpartition(-scores, top_k, axis=2)[:, :, :top_k].astype(np.uint8)
    return {"layers": layers, "top_k": top_k, "bytes": 1, "experts": chosen.tobytes()}


def tables(samples: int, tokens: int, routed: tuple[int, int, int] | None = None) -> dict[Step, pa.Table]:
    """Return the three snapshots of one batch. `routed`: numbers of layers, of a token's experts, of a layer's experts,
    at most 256."""
    draw = np.random.default_rng(0)
    ids = [draw.zipf(1.3, tokens).clip(0, 151_000).astype(np.int32) for _ in range(samples)]
    prompts = [draw.integers(0, 151_000, 96).astype(np.int32) for _ in range(samples // GROUP)]
    groups = np.arange(samples) // GROUP
    keys = {"group_id": groups, "sample_index": np.arange(samples) % GROUP}
    text = [" ".join(draw.choice(WORDS, tokens)) for _ in range(samples)]
    rewards = (draw.random(samples) < 0.4).astype(np.float32)
    constant = {
        "engine": "rollout:0",
        "finish_reason": "stop",
        "status": "completed",
        "error": None,
        "metadata": None,
        "segments": None,
    }
    rollout = {
        **keys,
        "rollout_id": np.arange(samples),
        "prompt_index": groups,
        "epoch": np.zeros(samples, np.int32),
        "prompt_text": [f"prompt {group}: " + TEXT for group in groups],
        "prompt_ids": [prompts[group] for group in groups],
        "response_text": text,
        "response_ids": ids,
        "log_probs": [-draw.exponential(0.6, tokens).astype(np.float32) for _ in range(samples)],
        "loss_mask": [np.ones(tokens, np.uint8)] * samples,
        "weight_versions": [np.full(tokens, 7, np.int32)] * samples,
        "seed": draw.integers(0, 2**63, samples).astype(np.uint64),
        "seconds": draw.random(samples).astype(np.float32),
        "cached_tokens": np.zeros(samples, np.int64),
        "label": ["72"] * samples,
        **{name: [value] * samples for name, value in constant.items()},
    }
    reward = {
        **keys,
        "reward": rewards,
        "components": [None] * samples,
        "grader": ["math"] * samples,
        "grader_version": ["0123456789abcdef"] * samples,
        "status": ["completed"] * samples,
        "error": [None] * samples,
    }
    per_token = [np.full(tokens, value, np.float32) for value in draw.normal(size=samples)]
    ages = [np.zeros(tokens, np.int32)] * samples
    advantage = {**keys, "reward": rewards, "advantages": per_token, "returns": per_token, "ages": ages}
    schema = ROLLOUT
    if routed is not None:
        schema = rollout_schema(cut=False, routed=True)
        rollout["routed_experts"] = [experts(draw, 96 + tokens - 1, *routed) for _ in range(samples)]
    columns = {Step.ROLLOUT: (rollout, schema), Step.REWARD: (reward, REWARD), Step.ADVANTAGE: (advantage, ADVANTAGE)}
    return {
        step: pa.table([pa.array(values[name], schema.field(name).type) for name in schema.names], schema=schema)
        for step, (values, schema) in columns.items()
    }


def cpu_seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a function, and the least CPU seconds of three calls."""
    seconds = []
    for _ in range(3):
        began = time.process_time()
        result = work()
        seconds.append(time.process_time() - began)
    return result, min(seconds)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=512, help="response tokens a sample")
    parser.add_argument(
        "--routed",
        type=int,
        nargs=3,
        metavar=("LAYERS", "TOP_K", "EXPERTS"),
        help="also the experts of each token, as for routing replay; at most 256 experts a layer",
    )
    arguments = parse(parser, samples=64, tokens=32)
    all_tokens = arguments.samples * arguments.tokens
    batch = tables(arguments.samples, arguments.tokens, arguments.routed)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.create(open_store(folder), "bench", {})
        lease = ledger.acquire()
        for step, table in batch.items():
            attempts = (ledger.attempt(0, step) for _ in range(3))
            output, writing = cpu_seconds(lambda: next(attempts).write_table("rows.parquet", table))  # noqa: B023
            read, reading = cpu_seconds(lambda: read_table(ledger.store, "bench", output))  # noqa: B023
            assert read.equals(table)
            found[step] = {"bytes_per_token": output.bytes / all_tokens, "write_seconds": writing}
            found[step]["read_seconds"] = reading
        lease.release(Outcome.COMPLETED)
    (_, part), encoding = cpu_seconds(lambda: part_bytes(batch[Step.ROLLOUT], "inputs"))
    found["in all"] = {name: sum(one[name] for one in found.values()) for name in found[Step.ROLLOUT]}
    found["write-ahead"] = {"bytes_per_token": len(part) / all_tokens, "write_seconds": encoding}
    for name, values in found.items():
        speeds = [
            f"{verb} {all_tokens / values[f'{verb}_seconds'] / 1e6:8.1f} M tokens per CPU second"
            for verb in ("write", "read")
            if f"{verb}_seconds" in values
        ]
        print(f"{name:12} {values['bytes_per_token']:8.3f} bytes per token  " + "  ".join(speeds))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
