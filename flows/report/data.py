"""Data of a report, read from the ledger: iterations from commits, samples and their tokens from the SQL views."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain

import numpy as np
import pyarrow as pa

from cairn.configs.schema.run import RunConfig
from cairn.flows.reading.costs import Costs, run_costs
from cairn.flows.reading.metrics import eval_metrics, iteration_metrics, read_iterations, step_seconds
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.layout import LAST_NUMBER
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import DATA
from cairn.storage.query.database import open_query

# Choice of the samples of a long run that are shown with their tokens.


_SHARE = 0.1


class Choice(IntEnum):
    """Why a sample was chosen."""

    NONE = 0
    """Not chosen."""
    ALL = 1
    """All samples were chosen, because they are few."""
    BEST = 2
    """Among the highest rewards."""
    WORST = 3
    """Among the lowest rewards, or failed."""
    MEDIAN = 4
    """A reward near the median."""
    SPREAD = 5
    """Drawn at random, about equally many from every iteration."""


def choose(iterations: np.ndarray, rewards: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Return a `Choice` for every sample, of which at most `most` are not NONE.

    A tenth of these are the best, a tenth the worst, a tenth the median ones; the others are drawn evenly from all
    iterations. Equal arguments give equal results.

    Args:
        rewards: NaN where a sample has none.
    """
    n = len(rewards)
    if n <= most:
        return np.full(n, Choice.ALL, np.uint8)
    chance = np.random.default_rng(seed)
    why = np.full(n, Choice.NONE, np.uint8)
    each = int(most * _SHARE)
    shuffled = chance.permutation(n)  # makes the choice among equal rewards random
    known = shuffled[np.isfinite(rewards[shuffled])]
    ascending = known[np.argsort(rewards[known], kind="stable")]
    failed = shuffled[~np.isfinite(rewards[shuffled])]
    middle = max(0, len(ascending) // 2 - each // 2)
    why[ascending[middle : middle + each]] = Choice.MEDIAN
    why[np.concatenate([failed[: each // 2], ascending])[:each]] = Choice.WORST
    why[ascending[max(0, len(ascending) - each) :]] = Choice.BEST
    remaining = most - int((why != Choice.NONE).sum())
    others = shuffled[why[shuffled] == Choice.NONE]
    # Take the nth sample of every iteration before the (n + 1)th of any.
    by_iteration = others[np.argsort(iterations[others], kind="stable")]
    _, firsts, counts = np.unique(iterations[by_iteration], return_index=True, return_counts=True)
    turns = np.arange(len(by_iteration)) - np.repeat(firsts, counts)
    ties = chance.permutation(len(by_iteration))
    why[by_iteration[np.lexsort((ties, turns))[:remaining]]] = Choice.SPREAD
    return why


Progress = Callable[[str, int, int], None]
"""Function of (current work, number done, total number)."""


@dataclass(frozen=True)
class Iteration:
    """An iteration, from its commits. Times are Unix seconds."""

    number: int
    metrics: Mapping[str, float]
    seconds: Mapping[Step, float]
    """Seconds in which at least one shard of a step was running."""
    began_at: float
    ended_at: float


@dataclass
class History:
    """A run's iterations and evaluations, in order, and its costs."""

    costs: Costs
    iterations: list[Iteration] = field(default_factory=list)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics by the number of iterations that the evaluated weights were trained for."""
    machines: dict[tuple[str, str, int], set[Step]] = field(default_factory=dict)
    """(device, host, threads) → steps that ran there."""


def read_history(ledger: Ledger, progress: Progress, price: float | None = None) -> History:
    """Read every commit of a run. `price`: of a device for an hour. Raises Damaged."""
    numbers, read = ledger.iterations(), []
    for done, commits in enumerate(read_iterations(ledger, numbers), 1):
        progress("reading commits", done, len(numbers))
        read.append(commits)
    return history_of(ledger, read, run_costs(ledger, price, read))


def history_of(
    ledger: Ledger,
    read: Sequence[Sequence[Commit]],
    costs: Costs,
    known: Mapping[int, Iteration] | None = None,
) -> History:
    """Return the history of a run from the commits of each iteration. `known`: iterations that need not be computed."""
    history = History(costs)
    for commits in filter(None, read):
        for commit in commits:
            place = commit.environment
            history.machines.setdefault((place.device, place.host or "", place.threads), set()).add(commit.step)
        one = (known or {}).get(commits[0].iteration)
        one = one or iteration_of(commits, ledger.config_of(*commits), imported=ledger.manifest.imported is not None)
        if one is not None:
            history.iterations.append(one)
    history.evaluations = dict(sorted(eval_metrics(chain.from_iterable(read)).items()))
    return history


def iteration_of(commits: Sequence[Commit], config: RunConfig, *, imported: bool = False) -> Iteration | None:
    """Return an iteration from its commits; None where it has only evaluations. `imported`: the commits are those of an
    import, whose time says nothing about the trainer."""
    own = [commit for commit in commits if commit.step is not Step.EVAL]
    if not own:
        return None
    metrics, seconds = iteration_metrics(own, config), step_seconds(commits)
    if imported:
        metrics, seconds = {name: metrics[name] for name in metrics if not name.startswith("perf/")}, {}
    began_at, ended_at = min(commit.started_at for commit in own), max(commit.committed_at for commit in own)
    return Iteration(own[0].iteration, metrics, seconds, began_at, ended_at)


@dataclass(frozen=True)
class Samples:
    """Every sample of a run once, by iteration and group."""

    rows: pa.Table
    """Table with the columns of `_SAMPLES`."""
    notes: tuple[str, ...] = ()
    """A sentence for each part that could not be read."""


_SAMPLES = f"""
SELECT
    iteration::INTEGER AS iteration,  -- in which it was generated, or finished
    shard,
    group_id,
    sample_index,
    prompt,
    response,
    label,
    prompt_tokens::INTEGER AS prompt_tokens,
    response_tokens::INTEGER AS response_tokens,
    masked_tokens::INTEGER AS masked_tokens,
    trajectories,
    CASE WHEN engine IS DISTINCT FROM '{DATA}' THEN log_prob END::FLOAT AS log_prob,
    finish_reason,
    status,
    error,
    seconds,
    reward,
    disposition AS fate,
    reason,
    advantage::FLOAT AS advantage,
    age
FROM samples
WHERE run = $run AND iteration BETWEEN $first AND $last
QUALIFY row_number() OVER (PARTITION BY group_id, sample_index ORDER BY iteration DESC, shard DESC) = 1
ORDER BY iteration, group_id, sample_index
"""
"""Query for the samples of some iterations. A resumed sample appears once, as its last shard stored it. Responses from
the data were not sampled, so they have no log-prob."""

_GROUPS = """
SELECT iteration::INTEGER AS iteration, group_id, fate, reason, avg(reward) AS reward
FROM (
    SELECT iteration, group_id, disposition AS fate, reason, reward
    FROM samples
    WHERE run = $run
    QUALIFY row_number() OVER (PARTITION BY group_id, sample_index ORDER BY iteration DESC, shard DESC) = 1
)
GROUP BY ALL
ORDER BY iteration, group_id
"""
"""Query for all groups; a resumed sample counts once."""

_SAMPLED = "sampled AND (loss_mask = 1 OR log_prob <> 0)"
"""SQL condition for a token that the policy sampled; tokens from the environment are masked and have log-prob 0."""
_TOKENS = f"""
SELECT
    row, token_id AS id, CASE WHEN {_SAMPLED} THEN log_prob END AS log_prob, loss_mask AS mask,
    weight_version AS version, advantage, "return", age,
    CASE WHEN {_SAMPLED} THEN old_log_prob - log_prob END AS log_ratio,
    old_log_prob - ref_log_prob AS ref_log_ratio, old_log_prob - teacher_log_prob AS teacher_log_ratio, value
FROM tokens
JOIN (
    SELECT
        unnest($rows::BIGINT[]) AS row, unnest($iteration::BIGINT[]) AS iteration, unnest($shard::VARCHAR[]) AS shard,
        unnest($group_id::BIGINT[]) AS group_id, unnest($sample_index::INTEGER[]) AS sample_index,
        unnest($sampled::BOOLEAN[]) AS sampled
) USING (iteration, shard, group_id, sample_index)
WHERE run = $run
ORDER BY row, position
"""
"""Query for the tokens of samples. Log-ratios compare the policy before the update, as the trainer computes it, with
the rollout engine, the reference model and the teacher. `row` is the sample's row among all samples."""


def read_samples(ledger: Ledger, progress: Progress, first: int = 0, last: int = LAST_NUMBER) -> Samples:
    """Read every sample of the iterations from `first` to `last`. Unreadable parts are noted and left out."""
    progress("reading samples", 0, 0)
    query = open_query(ledger.store, ledger.run)
    return Samples(query.sql(_SAMPLES, {"run": ledger.run, "first": first, "last": last}), query.notes)


def read_groups(ledger: Ledger) -> pa.Table:
    """Return a row for each group of a run: `iteration`, `fate`, `reason`, `reward`, the mean of its samples'."""
    return open_query(ledger.store, ledger.run).sql(_GROUPS, {"run": ledger.run})


def read_tokens(ledger: Ledger, samples: Samples, chosen: Sequence[int], progress: Progress) -> pa.Table:
    """Return a row for each token of the chosen samples, in their order: see `_TOKENS`."""
    progress("reading tokens", 0, 0)
    few = samples.rows.take(pa.array(chosen, pa.int64()))
    keys = {name: few.column(name).to_pylist() for name in ("iteration", "shard", "group_id", "sample_index")}
    keys["sampled"] = few.column("log_prob").is_valid().to_pylist()
    return open_query(ledger.store, ledger.run).sql(_TOKENS, {"run": ledger.run, "rows": list(chosen), **keys})
