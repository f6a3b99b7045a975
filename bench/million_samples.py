"""A ledger of many samples as a run would write it: its schemas, Parquet files and sealed commits, short responses."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger import layout
from cairn.storage.ledger import snapshots as tables
from cairn.storage.ledger.commits import Commit, OutputFile, Step
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import ADVANTAGE, FILTER, REWARD, ROLLOUT, SCORE
from cairn.storage.opening import open_store
from cairn.storage.records import Environment

RUN = "million"
GROUP = 8
_SHARDS = ("00-000", "00-001")
_WRITERS = 2
_ENVIRONMENT = Environment(
    device="Intel Xeon (avx512)", threads=1, host="box",
    versions=dict.fromkeys(("python", "torch", "transformers", "numpy", "pyarrow", "cairn"), "1.2.3"),
)  # fmt: skip


def write(folder: Path, config: RunConfig, iterations: int, samples: int, tokens: int) -> None:
    """Write a run whose iterations have `samples` samples each, in groups of eight, with `tokens` tokens a response;
    every group is trained on. Two shards, and nine commits an iteration. Files are not synced."""
    ledger = Ledger.create(open_store(str(folder)), RUN, config)
    ledger.acquire().release(Outcome.COMPLETED)
    shares = [(folder, range(writer, iterations, _WRITERS), samples, tokens) for writer in range(_WRITERS)]
    with ProcessPoolExecutor(_WRITERS) as pool:
        list(pool.map(_write_iterations, *zip(*shares, strict=True)))


def _write_iterations(folder: Path, iterations: range, samples: int, tokens: int) -> None:
    per_shard = samples // len(_SHARDS)
    for iteration in iterations:
        draw = np.random.default_rng(iteration)
        rollouts = [_rollout(draw, iteration, shard * per_shard, per_shard, tokens) for shard in range(len(_SHARDS))]
        rewards = [_rewards(draw, rollout) for rollout in rollouts]
        place = _Place(folder, iteration)
        made = [place.commit(Step.ROLLOUT, at, table) for at, table in zip(_SHARDS, rollouts, strict=True)]
        made += [place.commit(Step.REWARD, at, table) for at, table in zip(_SHARDS, rewards, strict=True)]
        made += [
            place.commit(Step.FILTER, "00", pa.concat_tables(map(_judged, _SHARDS, rollouts, [iteration] * 2)), made)
        ]
        whole, graded = pa.concat_tables(rollouts), pa.concat_tables(rewards)
        made += [place.commit(Step.SCORE, None, _scores(whole), made)]
        made += [place.commit(Step.ADVANTAGE, None, _advantages(whole, graded), made)]
        made += [place.commit(Step.TRAIN, None, None, made, {"loss": 0.1, "tokens": samples * tokens})]
        place.commit(Step.SYNC, None, None, made[-1:])


class _Place:
    def __init__(self, folder: Path, iteration: int):
        self.folder, self.iteration = folder, iteration

    def commit(
        self,
        step: Step,
        shard: str | None,
        table: pa.Table | None,
        inputs: list[Commit] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Commit:
        outputs: tuple[OutputFile, ...] = ()
        name = layout.attempt_name(shard, 1, f"{self.iteration:012x}")
        if table is not None:
            data = tables.to_parquet(table)
            path = f"{layout.attempt(RUN, self.iteration, step, name)}/rows.parquet"
            self._write(path, data)
            outputs = (
                OutputFile(
                    path=path.removeprefix(f"{layout.run(RUN)}/"), bytes=len(data), rows=table.num_rows,
                    sha256=hashlib.sha256(data).hexdigest(), content=hashlib.sha256(data).hexdigest(),
                ),
            )  # fmt: skip
        version = self.iteration + (step in (Step.TRAIN, Step.SYNC))
        commit = Commit(
            run=RUN, iteration=self.iteration, step=step, shard=shard, attempt=name, epoch=1,
            inputs={made.name: made.digest for made in inputs or []} | {"engine.rollout": "0" * 64},
            config_digest="0" * 64, outputs=outputs, weight_version_in=self.iteration, weight_version_out=version,
            state_digest=f"{version:064x}", metrics={f"metric_{i}": i / 7 for i in range(12)} | dict(metrics or {}),
            values={"full": True} if step is Step.FILTER else {},
            timings={"run": 1.0, "write": 0.1}, started_at=float(self.iteration), committed_at=self.iteration + 0.5,
            environment=_ENVIRONMENT,
        )  # fmt: skip
        self._write(layout.commit(RUN, self.iteration, step, shard), commit.to_bytes())
        return commit

    def _write(self, path: str, data: bytes) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def _rollout(draw: np.random.Generator, iteration: int, first: int, samples: int, tokens: int) -> pa.Table:
    ids = (iteration * 2 * samples + first + np.arange(samples)) // GROUP
    lists = np.arange(0, samples * tokens + 1, tokens, dtype=np.int32)

    def per_token(values: np.ndarray, type_: pa.DataType) -> pa.Array:
        return pa.ListArray.from_arrays(lists, pa.array(values, type_))

    token_ids = draw.integers(0, 50_000, samples * tokens)
    columns: dict[str, Any] = {
        "group_id": ids,
        "sample_index": np.arange(samples, dtype=np.int32) % GROUP,
        "rollout_id": ids * GROUP,
        "prompt_index": ids % 10_000,
        "epoch": np.zeros(samples, np.int32),
        "prompt_text": [f"What is {group} plus {group % 97}?" for group in ids],
        "prompt_ids": per_token(token_ids, pa.int32()),
        "response_text": [f"That is {group + group % 97}." for group in ids],
        "response_ids": per_token(token_ids, pa.int32()),
        "segments": pa.nulls(samples, ROLLOUT.field("segments").type),
        "log_probs": per_token(-draw.exponential(1.0, samples * tokens), pa.float32()),
        "loss_mask": per_token(np.ones(samples * tokens, np.uint8), pa.uint8()),
        "weight_versions": per_token(np.full(samples * tokens, iteration), pa.int32()),
        "finish_reason": ["stop"] * samples,
        "status": ["completed"] * samples,
        "error": pa.nulls(samples, pa.string()),
        "seed": draw.integers(0, 2**63, samples, dtype=np.uint64),
        "engine": ["rollout-0"] * samples,
        "seconds": draw.random(samples, np.float32),
        "cached_tokens": np.zeros(samples, np.int64),
        "label": [str(group + group % 97) for group in ids],
        "metadata": pa.nulls(samples, pa.string()),
    }
    return pa.table(columns, schema=ROLLOUT)


def _rewards(draw: np.random.Generator, rollout: pa.Table) -> pa.Table:
    rows = rollout.num_rows
    return pa.table(
        {
            "group_id": rollout.column("group_id"),
            "sample_index": rollout.column("sample_index"),
            "reward": draw.integers(0, 2, rows).astype(np.float32),
            "components": pa.nulls(rows, pa.string()),
            "grader": ["exact_match"] * rows,
            "grader_version": ["1"] * rows,
            "status": rollout.column("status"),
            "error": pa.nulls(rows, pa.string()),
        },
        schema=REWARD,
    )


def _judged(shard: str, rollout: pa.Table, iteration: int) -> pa.Table:
    ids = np.unique(rollout.column("group_id").to_numpy())
    rows = len(ids)
    return pa.table(
        {
            "group_id": ids,
            "iteration": np.full(rows, iteration),
            "shard": [shard] * rows,
            "kept": [True] * rows,
            "disposition": ["train"] * rows,
            "reason": pa.nulls(rows, pa.string()),
            "mean_reward": np.full(rows, 0.5, np.float32),
            "std_reward": np.full(rows, 0.5, np.float32),
            "age": np.zeros(rows, np.int32),
            "max_age": np.zeros(rows, np.int32),
        },
        schema=FILTER,
    )


def _scores(rollout: pa.Table) -> pa.Table:
    rows, log_probs = rollout.num_rows, rollout.column("log_probs")
    schema = pa.schema([SCORE.field(name) for name in ("group_id", "sample_index", "log_probs", "ref_log_probs")])
    columns = [rollout.column("group_id"), rollout.column("sample_index"), log_probs]
    return pa.table([*columns, pa.nulls(rows, log_probs.type)], schema=schema)


def _advantages(rollout: pa.Table, rewards: pa.Table) -> pa.Table:
    log_probs = rollout.column("log_probs")
    columns = [rollout.column("group_id"), rollout.column("sample_index"), rewards.column("reward"), log_probs]
    return pa.table([*columns, log_probs, rollout.column("weight_versions")], schema=ADVANTAGE)
