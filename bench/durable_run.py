"""A durable run as a user starts it, timed by its own ledger."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import pyarrow.compute as pc

from cairn.configs.loader import load
from cairn.configs.schema.run import RunConfig
from cairn.flows.reading.costs import ON_TRAINING, engine_of
from cairn.flows.reading.metrics import busy_until, covered_seconds
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.opening import open_store

RUN = "measured"
DEADLINE = 1200
"""Seconds that one run may take."""

CAIRN = str(Path(sys.executable).with_name("cairn"))

Interval = tuple[float, float]
"""Start and end, Unix seconds."""


@dataclass(frozen=True)
class Iteration:
    """Measurements of one iteration of a run."""

    response_lengths: list[int]
    """Response lengths in tokens, group by group."""
    rollout_seconds: float
    """Seconds in which a rollout engine worked on it, averaged over engines."""
    train_seconds: float
    """Seconds of its update alone."""


@dataclass(frozen=True)
class Outcome:
    """Measurements of a whole run."""

    seconds: float
    scores: dict[str, float]
    """Score by benchmark, after the last update."""
    ends: list[float] = field(default_factory=list)
    """Seconds until the end of each iteration's update."""
    points: dict[int, float] = field(default_factory=dict)
    """Score of the first benchmark, by number of iterations."""
    tokens: int = 0
    """Number of tokens of responses that were sampled and taken into batches."""
    group_size: int = 1
    iterations: list[Iteration] = field(default_factory=list)
    rollout_seconds: float = 0.0
    """Seconds in which a rollout engine worked on rollouts, averaged over engines."""
    train_seconds: float = 0.0
    """Seconds in which the trainer worked."""
    sync_seconds: float = 0.0
    """Seconds of these that were not the update, such as publishing weights."""


def durable_run(
    recipe: str, overrides: Sequence[str], after: int = 0, *, score_every: int | None = None, pinned: Sequence[str] = ()
) -> Outcome:
    """Execute a recipe in separate processes and measure it. The outcome's seconds count from the first rollout's
    start, or the end of `after` iterations, to the last update's end.

    Args:
        score_every: evaluate the weights after every N-th iteration on the recipe's benchmarks, if it has any. The
            evaluation follows the run, which then has none of its own. The weights are checkpoints.
        pinned: prefix of each command.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as store:
        config = load(recipe, list(overrides))
        if not config.eval.benchmarks:
            score_every = None
        if score_every is not None:
            overrides = [*overrides, "eval.eval_interval=null", f"checkpoint.save_interval={score_every}"]
        options = [word for option in overrides for word in ("--set", option)]
        command = [*pinned, CAIRN, "train", recipe, "--run", RUN, "--store", store, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE)
        outcome = _measured(Ledger.open(open_store(store), RUN), config, after)
        if score_every is None:
            return outcome
        scored = f"{RUN}@{score_every - 1}:{config.rollout.num_rollout - 1}"
        names = [benchmark.name for benchmark in config.eval.benchmarks]
        command = [*pinned, CAIRN, "eval", scored, *names, "--every", str(score_every), "--store", store, "--json"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=DEADLINE)
        found = {(one["benchmark"], one["origin"]["iteration"] + 1): one["metrics"] for one in json.loads(done.stdout)}
        points = {name: {done: m["score"] for (of, done), m in found.items() if of == name} for name in names}
        return replace(
            outcome,
            scores={name: own[max(own)] for name, own in points.items()},
            points=points[names[0]],
        )


def _measured(ledger: Ledger, config: RunConfig, after: int) -> Outcome:
    last = ledger.last_iteration()
    assert last is not None
    commits = [commit for iteration in range(last + 1) for commit in ledger.commits(iteration)]
    synced = {commit.iteration: busy_until(commit) for commit in commits if commit.step is Step.SYNC}
    rollouts = [commit for commit in commits if commit.step is Step.ROLLOUT and commit.iteration >= after]
    start = synced[after - 1] if after else min(commit.started_at for commit in rollouts)

    def seconds_of(steps: Collection[Step]) -> float:
        own = (commit for commit in commits if commit.step in steps and busy_until(commit) > start)
        return covered_seconds((max(start, commit.started_at), busy_until(commit)) for commit in own)

    training = seconds_of(ON_TRAINING)
    last_scores = (commit for commit in commits if commit.step is Step.EVAL and commit.iteration == last)
    iterations = [_iteration(ledger, [c for c in commits if c.iteration == i], config) for i in range(after, last + 1)]
    return Outcome(
        seconds=synced[last] - start,
        scores={name: commit.metrics[name] for commit in last_scores for name in [str(commit.values["benchmark"])]},
        ends=[synced[iteration] - start for iteration in range(after, last + 1)],
        tokens=sum(sum(iteration.response_lengths) for iteration in iterations),
        group_size=config.rollout.n_samples_per_prompt,
        iterations=iterations,
        rollout_seconds=_rollout_seconds(rollouts, config),
        train_seconds=training,
        sync_seconds=training - seconds_of({Step.TRAIN}),
    )


def _rollout_seconds(rollouts: Iterable[Commit], config: RunConfig) -> float:
    """Return the seconds in which a rollout engine worked, averaged over engines. A streaming run records the working
    time of all engines; otherwise each engine works on its own shards."""
    streamed = 0.0
    shards: list[list[Interval]] = [[] for _ in range(config.rollout.num_engines)]
    for commit in rollouts:
        if "engines" in commit.timings:
            streamed += commit.timings["engines"] / config.rollout.num_engines
        else:
            shards[engine_of(commit, config)].append((commit.started_at, commit.committed_at))
    return streamed + fmean(covered_seconds(own) for own in shards)


def _iteration(ledger: Ledger, commits: Sequence[Commit], config: RunConfig) -> Iteration:
    rollouts = [commit for commit in commits if commit.step is Step.ROLLOUT]
    return Iteration(
        [length for commit in rollouts for length in _response_lengths(ledger, commit)],
        _rollout_seconds(rollouts, config),
        covered_seconds((c.started_at, c.committed_at) for c in commits if c.step is Step.TRAIN),
    )


def _response_lengths(ledger: Ledger, commit: Commit) -> list[int]:
    """Return the response lengths of a rollout shard's samples, in tokens."""
    table = read_table(ledger.store, commit.run, commit.table, ["response_ids"])
    lengths: list[int] = pc.list_value_length(table["response_ids"]).to_pylist()
    return lengths
