"""Small ledgers and tables for the storage tests."""

import time
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import ROLLOUT, Status
from cairn.storage.ledger.snapshots import Attempt
from cairn.storage.records import Environment

ENVIRONMENT = Environment(device="cpu", threads=1, host="box", versions={"torch": "2.13.0"})
CONFIG = {"seed": 1, "training": {"lr": 1e-6, "betas": [0.9, 0.98]}}


def commit_step(
    ledger: Ledger,
    iteration: int,
    step: Step,
    shard: str | None = None,
    *,
    inputs: tuple[Commit, ...] = (),
    table: pa.Table | None = None,
    attempt: Attempt | None = None,
    **fields: Any,
) -> Commit:
    """Commit a step, with a table as its only file where one is given."""
    attempt = attempt or ledger.attempt(iteration, step, shard)
    outputs = () if table is None else (attempt.write_table("samples.parquet", table),)
    return ledger.commit(
        iteration=iteration,
        step=step,
        shard=shard,
        attempt=attempt,
        inputs={commit.name: commit.digest for commit in inputs},
        config_digest="0" * 64,
        environment=ENVIRONMENT,
        started_at=time.time(),
        outputs=outputs,
        **fields,
    )


def rollout_table(groups: list[int], *, samples: int = 2, tokens: int = 5, seed: int = 0) -> pa.Table:
    """Rollout rows of some groups; the tokens depend on `seed`."""
    rng = np.random.default_rng(seed)
    n = len(groups) * samples
    columns = {
        "group_id": np.repeat(groups, samples),
        "sample_index": np.tile(np.arange(samples), len(groups)),
        "rollout_id": np.arange(n),
        "prompt_index": np.repeat(groups, samples),
        "epoch": [0] * n,
        "prompt_text": ["2 + 2 ="] * n,
        "prompt_ids": [[1, 2, 3]] * n,
        "response_text": ["4"] * n,
        "response_ids": list(rng.integers(0, 151_000, (n, tokens), dtype=np.int32)),
        "segments": [None] * n,
        "log_probs": list(-rng.exponential(0.6, (n, tokens)).astype(np.float32)),
        "loss_mask": [[1] * tokens] * n,
        "weight_versions": [[7] * tokens] * n,
        "finish_reason": ["stop"] * n,
        "status": [str(Status.COMPLETED)] * n,
        "error": [None] * n,
        "seed": rng.integers(0, 2**64, n, dtype=np.uint64),
        "engine": ["transformers"] * n,
        "seconds": [0.5] * n,
        "cached_tokens": [0] * n,
        "label": ["4"] * n,
        "metadata": [None] * n,
    }
    return pa.table({name: pa.array(columns[name], ROLLOUT.field(name).type) for name in ROLLOUT.names}, ROLLOUT)
