"""`score`: log-probs of the kept samples under the old policy and the reference, where the algorithm needs them."""

import numpy as np
import pyarrow as pa

from configs.schema.run import RunConfig
from storage.commits import Commit, Step
from storage.schemas import SCORE
from tasks.batch import rows_of_groups, train_batch
from tasks.recovery import prepare_trainer
from tasks.step import Outcome, StepCall, durable


def needs_old_log_probs(config: RunConfig) -> bool:
    """Whether the old policy must be scored: with one optimizer step a rollout it is the policy itself."""
    return not config.algorithm.use_rollout_logprobs and config.training.num_steps_per_rollout > 1


def needs_scores(config: RunConfig) -> bool:
    """Whether an iteration has a score step at all."""
    return needs_old_log_probs(config) or config.algorithm.use_kl_loss


@durable(
    Step.SCORE,
    reads=(
        "algorithm.use_kl_loss",
        "algorithm.use_rollout_logprobs",
        "training.engine",
        "training.megatron",
        "training.world_size",
        "training.num_threads",
        "training.dtype",
        "training.max_tokens_per_gpu",
        "training.num_steps_per_rollout",
        "rollout.rollout_temperature",
    ),
    externals=("model", "ref_model"),
)
def score(step: StepCall, weights: Commit | None, selection: Commit, rollouts: list[Commit]) -> Outcome:
    """Score every trained sample, in the order of the batch."""
    run = step.run
    batch = train_batch(run, selection, rollouts)
    with run.weights_lock:
        prepare_trainer(run, weights)
        old = run.fleet.training.score(batch, "actor") if needs_old_log_probs(run.config) else None
        ref = run.fleet.training.score(batch, "ref") if run.config.algorithm.use_kl_loss else None
    keys = pa.concat_tables(rows_of_groups(run, selection, rollouts, []))
    nothing = [None] * len(batch)
    table = pa.table(
        {
            "group_id": keys.column("group_id"),
            "sample_index": keys.column("sample_index"),
            "log_probs": pa.array(nothing if old is None else old, SCORE.field("log_probs").type),
            "ref_log_probs": pa.array(nothing if ref is None else ref, SCORE.field("ref_log_probs").type),
        },
        SCORE,
    )
    metrics = {}
    if old is not None:
        metrics["log_probs"] = float(np.concatenate(old).mean())
    if ref is not None:
        metrics["ref_log_probs"] = float(np.concatenate(ref).mean())
    return Outcome(tables={"scores.parquet": table}, metrics=metrics)
