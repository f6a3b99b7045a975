"""Progress of the halves of a run's iterations, and the weights that open halves need.

Collecting runs ahead of learning by the lag k (`cairn.flows.pipeline`). If the newest commits belong to iteration n,
all iterations before n-k are complete: collecting n began when iteration n-1-k was complete.
"""

import itertools

from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.selection import find_selection
from cairn.tasks.durable.versions import version_of
from cairn.tasks.evaluation.evaluate import eval_due, eval_shard
from cairn.tasks.trainer.checkpoint import checkpoint_due
from cairn.tasks.trainer.score import needs_scores
from cairn.tasks.trainer.sync import publish


def learning_steps(config: RunConfig, iteration: int, *, scored: bool | None = None) -> list[Step]:
    """Return the steps of an iteration's half `learn`, in order. Weights that no engine samples from are not
    published.

    Args:
        scored: whether there is a score step. None queries the algorithm, which may be user code.
    """
    due = {
        Step.SCORE: needs_scores(config) if scored is None else scored,
        Step.ADVANTAGE: config.algorithm.learns_from != "demonstrations",
        Step.TRAIN: True,
        Step.CHECKPOINT: checkpoint_due(config, iteration),
        Step.SYNC: config.samples_responses or eval_due(config, iteration),
    }
    return [step for step, is_due in due.items() if is_due]


def oldest_open(ledger: Ledger, last: int | None = None) -> int:
    """Return the oldest iteration that may have an unfinished half. `last`: the newest with a commit, if known."""
    newest = ledger.last_iteration() if last is None else last
    return max((newest or 0) - ledger.lag, ledger.first_iteration)


def newest_sampled(config: RolloutConfig, trained: int) -> int:
    """Return, for a stream, the newest iteration up to `trained` whose weights engines sample with; -1 for the initial
    weights. Engines load the weights of every `update_weights_interval`-th iteration."""
    interval = config.update_weights_interval
    return (trained + 1) // interval * interval - 1


def weights_after(run: RunContext, iteration: int) -> Commit | None:
    """Return the train step that left the weights of an iteration; None below 0, for the initial weights."""
    return run.committed(iteration, Step.TRAIN) if iteration >= 0 else None


def newest_trained(run: RunContext) -> int:
    """Return the newest trained iteration; -1 without one."""
    total, first = run.config.rollout.num_rollout, oldest_open(run.ledger)
    return next(i for i in itertools.count(first) if i == total or run.find(i, Step.TRAIN) is None) - 1


def publish_for_open_halves(run: RunContext) -> None:
    """Publish the weights that open halves need and that learning will not publish again.

    It starts with the oldest, so that the training engine never has to go back. In the `sync` pipeline only the newest
    are needed, and the rollout requests them itself.
    """
    if not run.config.rollout.weights_lag:
        return
    needed = needed_weights(run)
    for iteration in range(min(needed), max(needed) + 1) if needed else ():
        weights = weights_after(run, iteration)
        if version_of(weights) not in run.fleet.weights.published():
            publish(run, weights)


def needed_weights(run: RunContext) -> set[int]:
    """Return the trained iterations whose weights must still be sampled from; -1 for the initial weights."""
    lag, total, first = run.config.rollout.weights_lag, run.config.rollout.num_rollout, oldest_open(run.ledger)
    collecting = next(i for i in itertools.count(first) if i == total or find_selection(run, i) is None)
    trained = newest_trained(run)
    if run.config.rollout.pipeline == "streaming":
        behaviours = {newest_sampled(run.config.rollout, trained)} if collecting < total else set()
    else:
        behaviours = {max(-1, i - 1 - lag) for i in range(collecting, min(total, trained + lag + 2))}
    return behaviours | {i for i in range(first, trained + 1) if not _is_evaluated(run, i)}


def _is_evaluated(run: RunContext, iteration: int) -> bool:
    if not eval_due(run.config, iteration):
        return True
    version = version_of(weights_after(run, iteration))
    shards = (eval_shard(benchmark, version) for benchmark in run.config.eval.benchmarks)
    return all(run.find(iteration, Step.EVAL, shard) is not None for shard in shards)
