"""A durable run as a user starts it, timed by its own ledger."""

import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import pyarrow.compute as pc

from cairn.configs.loader import load
from cairn.configs.schema.run import RunConfig
from cairn.flows.costs.device_time import ON_TRAINING, engine_of
from cairn.flows.reading.metrics import covered_seconds
from cairn.storage.commits import Commit, Step
from cairn.storage.ledger import Ledger
from cairn.storage.snapshots import read_table
from cairn.storage.store import open_store

DEADLINE = 1200
"""Seconds of one run."""

CAIRN = str(Path(sys.executable).with_name("cairn"))

Interval = tuple[float, float]
"""Start and end, Unix seconds."""


@dataclass(frozen=True)
class Iteration:
    """What one iteration of a run was."""

    response_lengths: list[int]
    """Tokens, group by group."""
    rollout_seconds: float
    """In which a rollout engine worked on it, the mean over engines."""
    train_seconds: float
    """Of its update alone."""


@dataclass(frozen=True)
class Outcome:
    """A whole run."""

    seconds: float
    scores: dict[str, float]
    """By benchmark, after the last update."""
    ends: list[float] = field(default_factory=list)
    """Seconds at the end of each iteration's update. What evaluations kept from the trainer is left out of all
    times."""
    points: dict[int, float] = field(default_factory=dict)
    """Score of the first benchmark after so many iterations."""
    tokens: int = 0
    """Of the responses that were sampled and taken into batches."""
    group_size: int = 1
    iterations: list[Iteration] = field(default_factory=list)
    rollout_seconds: float = 0.0
    """In which a rollout engine worked on rollouts, the mean over engines."""
    train_seconds: float = 0.0
    """In which the trainer worked."""
    sync_seconds: float = 0.0
    """Of them, publishing weights and what else is not the update."""


def durable_run(recipe: str, overrides: Sequence[str], after: int = 0) -> Outcome:
    """Execute a recipe in processes of its own; its seconds are those from the first rollout's start, or the end of so
    many iterations, to the last update's end, without those that evaluations kept from the trainer."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as store:
        options = [word for option in overrides for word in ("--set", option)]
        command = [CAIRN, "train", recipe, "--run", "measured", "--store", store, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE)
        return _measured(Ledger.open(open_store(store), "measured"), load(recipe, list(overrides)), after)


def _measured(ledger: Ledger, config: RunConfig, after: int) -> Outcome:
    last = ledger.last_iteration()
    assert last is not None
    commits = [commit for iteration in range(last + 1) for commit in ledger.commits(iteration)]
    evaluated = [commit for commit in commits if commit.step is Step.EVAL]
    synced = {commit.iteration: commit.committed_at for commit in commits if commit.step is Step.SYNC}
    rollouts = [commit for commit in commits if commit.step is Step.ROLLOUT and commit.iteration >= after]
    start = synced[after - 1] if after else min(commit.started_at for commit in rollouts)

    def of(steps: Collection[Step]) -> list[Interval]:
        own = (commit for commit in commits if commit.step in steps and commit.committed_at > start)
        return [(max(start, commit.started_at), commit.committed_at) for commit in own]

    training = of(ON_TRAINING)

    def seconds(end: float) -> float:
        """From the start, less those in which there was an evaluation and the trainer did not work."""
        busy = _until(training, end)
        return end - start - (covered_seconds([*_until(of({Step.EVAL}), end), *busy]) - covered_seconds(busy))

    names = [benchmark.name for benchmark in config.eval.benchmarks]
    iterations = [_iteration(ledger, [c for c in commits if c.iteration == i], config) for i in range(after, last + 1)]
    return Outcome(
        seconds=seconds(synced[last]),
        scores={name: _score(commit) for commit in evaluated if commit.iteration == last for name in [_name(commit)]},
        ends=[seconds(synced[iteration]) for iteration in range(after, last + 1)],
        points={commit.iteration + 1: _score(commit) for commit in evaluated if names and _name(commit) == names[0]},
        tokens=sum(sum(iteration.response_lengths) for iteration in iterations),
        group_size=config.rollout.n_samples_per_prompt,
        iterations=iterations,
        rollout_seconds=_rollout_seconds(rollouts, config),
        train_seconds=covered_seconds(training),
        sync_seconds=covered_seconds(training) - covered_seconds(of({Step.TRAIN})),
    )


def _rollout_seconds(rollouts: Iterable[Commit], config: RunConfig) -> float:
    """A stream says how long all engines worked; otherwise each works in its own shards."""
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
    """In tokens, of the samples of a rollout shard."""
    table = read_table(ledger.store, commit.run, commit.table, ["response_ids"])
    lengths: list[int] = pc.list_value_length(table["response_ids"]).to_pylist()
    return lengths


def _until(intervals: Iterable[Interval], end: float) -> list[Interval]:
    return [(first, min(last, end)) for first, last in intervals if first < end]


def _name(commit: Commit) -> str:
    return str(commit.values["benchmark"])


def _score(commit: Commit) -> float:
    return commit.metrics[_name(commit)]
