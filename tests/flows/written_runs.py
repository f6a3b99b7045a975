"""Ledgers of small runs, written step by step through the storage layer as a driver would, without any engine.

An iteration generates three groups of two samples in two shards. Groups 0 and 1 of it get rewards 1 and 0, are trained
on, and have advantages +1 and −1; group 2 gets twice 1 and is dropped, so that the mean reward is 2/3 of what is
generated and 1/2 of what is trained on. Iteration i raises the mean reward of nothing:
all iterations are alike but for ids, versions and the benchmark's score, which is 0.25 at first and rises by 0.25 with
every iteration.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn.configs.loader import parse
from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import ADVANTAGE, EVAL, FILTER, REWARD, ROLLOUT
from cairn.storage.opening import open_store
from cairn.storage.store.local import LocalStore
from cairn.storage.store.store import Store
from cairn.tasks.evaluation.evaluate import eval_due, eval_shard
from cairn.tasks.steps import rules
from cairn.tasks.trainer.checkpoint import checkpoint_due
from tests.storage.builders import commit_step

SHARDS = {"00-000": (0, 1), "00-001": (2,)}
REWARDS = {0: (1.0, 0.0), 1: (1.0, 0.0), 2: (1.0, 1.0)}
RECIPE: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"path": "train.jsonl"},
    "rollout": {
        "num_rollout": 3,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 3,
        "n_samples_per_prompt": 2,
        "num_engines": 2,
        "dynamic_sampling_filter": "check_reward_nonzero_std",
        "rollout_max_response_len": 8,
    },
    "checkpoint": {"save_interval": 2},
    "eval": {"eval_interval": 2, "benchmarks": [{"name": "heldout", "path": "test.jsonl", "max_response_len": 8}]},
}


def config_of(ledger: Ledger) -> RunConfig:
    """The run's configuration."""
    return RunConfig.model_validate(ledger.manifest.config)


def bytes_of(store: Path) -> dict[str, bytes]:
    """Return the content of every file of a local store."""
    return {str(path): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def recorded_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the path of each further read of a local store, except reads of leases, which the
    clock renews."""
    reads: list[str] = []
    read = LocalStore.read

    def counting(self: LocalStore, path: str) -> bytes:
        if "/leases/" not in path:
            reads.append(path)
        return read(self, path)

    monkeypatch.setattr(LocalStore, "read", counting)
    return reads


def new_run(store: Store | str, run: str = "toy", **sections: dict[str, Any]) -> Ledger:
    """A run without commits, owned by this process. `sections` are options that differ from RECIPE's."""
    values = {name: RECIPE.get(name, {}) | sections.get(name, {}) for name in {*RECIPE, *sections}}
    opened = open_store(store) if isinstance(store, str) else store
    config = parse(values)
    ledger = Ledger.create(opened, run, config, {"data": "0" * 64}, rules=rules(config))
    ledger.acquire()
    return ledger


def write_run(ledger: Ledger, iterations: int) -> None:
    """Write the first iterations of a run."""
    for iteration in range(iterations):
        write_iteration(ledger, iteration)


def write_iteration(
    ledger: Ledger, iteration: int, until: Step | None = None, buffered: tuple[int, ...] = ()
) -> list[Commit]:
    """Write the commits of an iteration, those before step `until` or all. `buffered` are groups of the iteration
    before that it trains on too."""
    config, written = config_of(ledger), []
    before = ledger.find(iteration - 1, Step.TRAIN) if iteration else None
    version = iteration * config.training.num_steps_per_rollout
    weights = [] if before is None else [before]

    def write(
        step: Step, shard: str | None, inputs: list[Commit], table: pa.Table | None = None, **fields: Any
    ) -> Commit:
        commit = commit_step(ledger, iteration, step, shard, inputs=tuple(inputs), table=table, **fields)
        written.append(commit)
        return commit

    def evaluate(inputs: list[Commit], version: int) -> None:
        for benchmark in config.eval.benchmarks:
            score = 0.25 * (1 + version // config.training.num_steps_per_rollout)
            name = benchmark.name
            metrics = {name: score, f"{name}-graded": score, f"{name}-failed_samples": 0, f"{name}-truncated_ratio": 0}
            metrics |= {f"eval/{name}/response_len/{statistic}": 3 for statistic in ("mean", "max")}
            write(
                Step.EVAL, eval_shard(benchmark, version), inputs, eval_table(name, version),
                values={"benchmark": name}, metrics=metrics,
                weight_version_in=version, weight_version_out=version,
            )  # fmt: skip

    def stop(step: Step) -> bool:
        return until is step

    if iteration == 0 and config.eval.eval_interval and not config.eval.skip_eval_before_train:
        evaluate([], 0)
    if stop(Step.ROLLOUT):
        return written
    rollouts = [
        write(
            Step.ROLLOUT, shard, weights, rollout_table(iteration, groups, version),
            values={"cursor": 3 * (iteration + 1)}, metrics=rollout_metrics(groups), weight_version_in=version,
        )
        for shard, groups in SHARDS.items()
    ]  # fmt: skip
    if stop(Step.REWARD):
        return written
    rewards = [
        write(
            Step.REWARD, shard, [rollout], reward_table(iteration, groups),
            metrics={"failed_samples": 0},
        )
        for (shard, groups), rollout in zip(SHARDS.items(), rollouts, strict=True)
    ]  # fmt: skip
    if stop(Step.FILTER):
        return written
    selection = write(
        Step.FILTER, "00", [*rollouts, *rewards], filter_table(iteration, buffered),
        values={"full": True, "missing": 0, "cursor": 3 * (iteration + 1), "round": 0, "buffered": 0, "unfinished": 0},
        metrics={"groups": 3, "rounds": 1, "buffered": 0, "dynamic_filter/drop_zero_std_1": 1, "raw_reward": 2 / 3},
    )  # fmt: skip
    if stop(Step.ADVANTAGE):
        return written
    advantages = write(
        Step.ADVANTAGE, None, [selection, *rollouts, *rewards], advantage_table(iteration),
        metrics={
            "raw_reward": 0.5, "advantages": 0.0, "returns": 0.0, "rollout_log_probs": -0.5, "truncated_ratio": 0.0,
            "response_len/mean": 2.5, "response_len/median": 2.5, "response_len/max": 3, "response_len/min": 2,
        },
    )  # fmt: skip
    if stop(Step.TRAIN):
        return written
    after = version + config.training.num_steps_per_rollout
    trained = write(
        Step.TRAIN, None, [*weights, selection, *rollouts, advantages],
        weight_version_in=version, weight_version_out=after, state_digest=f"{after:064x}",
        metrics={"loss": 0.1, "pg_loss": 0.1, "grad_norm": 2.0, "tokens": 28},
    )  # fmt: skip
    if stop(Step.CHECKPOINT):
        return written
    if checkpoint_due(config, iteration):
        write(Step.CHECKPOINT, None, [trained, selection], state_digest=trained.state_digest)
    if stop(Step.SYNC):
        return written
    write(Step.SYNC, None, [trained], values={"versions": [after, after]})
    if stop(Step.EVAL):
        return written
    if eval_due(config, iteration):
        evaluate([trained], after)
    return written


def rollout_metrics(groups: tuple[int, ...]) -> dict[str, float]:
    """As the rollout step reports them: prompts have 3 tokens, group g's responses g + 2."""
    tokens = sum(2 * (group + 2) for group in groups)
    samples = 2 * len(groups)
    return {
        "samples": samples,
        "generated_groups": len(groups),
        "recovered_groups": 0,
        "prompt_tokens": 3 * samples,
        "response_tokens": tokens,
        "passed_over_prompts": 0,
    }


def rollout_table(iteration: int, groups: tuple[int, ...], version: int) -> pa.Table:
    """Two samples a group: `2 + 2 = ` answered with 4 and 5, in g + 2 tokens."""
    rows = []
    for group in groups:
        for index in range(2):
            tokens = group + 2
            group_id = 3 * iteration + group
            rows.append(
                {
                    "group_id": group_id,
                    "sample_index": index,
                    "rollout_id": 2 * group_id + index,
                    "prompt_index": group_id,
                    "epoch": 0,
                    "prompt_text": f"[{group_id}] 2 + 2 =",
                    "prompt_ids": [1, 2, 3],
                    "response_text": "4" if index == 0 else "5 \x1b[31m[bold]\x7f\x9b31m",
                    "response_ids": [7] * tokens,
                    "log_probs": [-0.5] * tokens,
                    "loss_mask": [1] * tokens,
                    "weight_versions": [version] * tokens,
                    "finish_reason": "stop",
                    "status": "completed",
                    "error": None,
                    "seed": group_id,
                    "engine": "rollout-0",
                    "seconds": 0.5,
                    "cached_tokens": 0,
                    "label": "4",
                    "metadata": None,
                }
            )
    return pa.Table.from_pylist(rows, ROLLOUT)


def reward_table(iteration: int, groups: tuple[int, ...]) -> pa.Table:
    """REWARDS of the groups."""
    rows = [
        {
            "group_id": 3 * iteration + group,
            "sample_index": index,
            "reward": REWARDS[group][index],
            "components": None,
            "grader": "exact_match",
            "grader_version": "1",
            "status": "completed",
            "error": None,
        }
        for group in groups
        for index in range(2)
    ]
    return pa.Table.from_pylist(rows, REWARD)


def filter_table(iteration: int, buffered: tuple[int, ...] = (), waiting: tuple[int, ...] = ()) -> pa.Table:
    """Groups 0 and 1 are trained on, unless they are `waiting` in the buffer, group 2 is dropped; `buffered` groups of
    the iteration before are trained on."""
    rows: list[dict[str, Any]] = [
        {
            "group_id": 3 * (iteration - 1) + group,
            "iteration": iteration - 1,
            "shard": next(shard for shard, groups in SHARDS.items() if group in groups),
            "kept": True,
            "disposition": "train",
            "reason": None,
            "mean_reward": sum(REWARDS[group]) / 2,
            "std_reward": 0.0,
        }
        for group in buffered
    ]
    rows += [
        {
            "group_id": 3 * iteration + group,
            "iteration": iteration,
            "shard": shard,
            "kept": group != 2,
            "disposition": "drop" if group == 2 else "buffer" if group in waiting else "train",
            "reason": "zero_std_1" if group == 2 else None,
            "mean_reward": sum(REWARDS[group]) / 2,
            "std_reward": 0.0 if group == 2 else 0.5,
        }
        for shard, groups in SHARDS.items()
        for group in groups
    ]
    return pa.Table.from_pylist(rows, FILTER)


def advantage_table(iteration: int) -> pa.Table:
    """+1 for the first sample of a trained group, −1 for the second."""
    rows = [
        {
            "group_id": 3 * iteration + group,
            "sample_index": index,
            "reward": REWARDS[group][index],
            "advantages": [1.0 - 2 * index] * (group + 2),
            "returns": [1.0 - 2 * index] * (group + 2),
        }
        for group in (0, 1)
        for index in range(2)
    ]
    return pa.Table.from_pylist(rows, ADVANTAGE)


def eval_table(benchmark: str, version: int) -> pa.Table:
    """One graded sample."""
    row = {
        "benchmark": benchmark,
        "prompt_index": 0,
        "sample_index": 0,
        "prompt_text": "1 + 1 =",
        "response_text": "2",
        "response_ids": [5, 6, 7],
        "reward": 1.0,
        "label": "2",
        "finish_reason": "stop",
        "status": "completed",
        "error": None,
        "seed": 1,
        "weight_version": version,
    }
    return pa.Table.from_pylist([row], EVAL)
