"""Size and speed of snapshots: a sample's rollout, reward and advantage rows as committed Parquet.

    python -m bench.snapshots [--samples 2048] [--tokens 512] [--smoke] [--json FILE]

Token ids are drawn from a Zipf distribution over 151,000 words, log-probs from an exponential one, and texts from
twenty words. The dominant columns, the ids and the float32 log-probs, compress no better than those of a language
model. They are written through the storage layer to a temporary folder, fsync included.
"""

import argparse
import json
import tempfile
import time

import numpy as np
import pyarrow as pa

from bench.command import parse
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import ADVANTAGE, REWARD, ROLLOUT
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.opening import open_store

TEXT = "the sum is so we get answer therefore let x = 12 7 + find each cost total of apples"
WORDS = TEXT.split(" ")
GROUP = 8


def tables(samples: int, tokens: int) -> dict[Step, pa.Table]:
    """Return the three snapshots of one batch."""
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
    columns = {Step.ROLLOUT: (rollout, ROLLOUT), Step.REWARD: (reward, REWARD), Step.ADVANTAGE: (advantage, ADVANTAGE)}
    return {
        step: pa.table([pa.array(values[name], schema.field(name).type) for name in schema.names], schema=schema)
        for step, (values, schema) in columns.items()
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=512, help="response tokens a sample")
    arguments = parse(parser, samples=64, tokens=32)
    all_tokens = arguments.samples * arguments.tokens
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.create(open_store(folder), "bench", {})
        lease = ledger.acquire()
        for step, table in tables(arguments.samples, arguments.tokens).items():
            began = time.perf_counter()
            output = ledger.attempt(0, step).write_table("rows.parquet", table)
            written = time.perf_counter()
            assert read_table(ledger.store, "bench", output).equals(table)
            found[step] = {
                "bytes_per_token": output.bytes / all_tokens,
                "write_seconds": written - began,
                "read_seconds": time.perf_counter() - written,
            }
        lease.release(Outcome.COMPLETED)
    for step, values in found.items():
        print(f"{step:10} " + "  ".join(f"{name} {value:.3f}" for name, value in values.items()))
    print(f"in all     {sum(values['bytes_per_token'] for values in found.values()):.2f} bytes per token")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
