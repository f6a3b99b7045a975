"""`score`: log-probs of the kept samples under the old policy, the reference and the teacher, and the critic's values,
where the algorithm needs them."""

from typing import Any

import numpy as np
import pyarrow as pa

from cairn.configs.schema.run import RunConfig
from cairn.engines.training.needs import scores_needed
from cairn.storage.commits import Commit, Step
from cairn.storage.schemas import SCORE
from cairn.tasks.batch import rows_of_groups, train_batch
from cairn.tasks.recovery import prepare_trainer
from cairn.tasks.sequences import of_samples
from cairn.tasks.step import Outcome, StepCall, durable


def needs_scores(config: RunConfig) -> bool:
    """Whether an iteration has a score step at all."""
    return bool(scores_needed(config.algorithm, config.training.num_steps_per_rollout))


@durable(Step.SCORE, externals=("model", "ref_model", "teacher_model", "critic_model"), engines=("training",))
def score(step: StepCall, weights: Commit | None, selection: Commit, rollouts: list[Commit]) -> Outcome:
    """Score every trained sample, in the order of the batch."""
    run, config = step.run, step.run.config
    batch = train_batch(run, selection, rollouts)
    needed = scores_needed(config.algorithm, config.training.num_steps_per_rollout)
    names = {column: "log_probs" if column == "old_log_probs" else column for column in needed}
    with run.weights_lock:
        prepare_trainer(run, weights)
        scored = {
            names[column]: of_samples(batch, run.fleet.training.score(batch, role)) for column, role in needed.items()
        }
    keys = pa.concat_tables(rows_of_groups(run, selection, rollouts, []))
    columns: dict[str, Any] = {name: keys.column(name) for name in ("group_id", "sample_index")}
    nothing = dict.fromkeys(("log_probs", "ref_log_probs"), [None] * keys.num_rows)
    columns |= {name: pa.array(lists, SCORE.field(name).type) for name, lists in {**nothing, **scored}.items()}
    schema = pa.schema([field for field in SCORE if field.name in columns])
    return Outcome(
        tables={"scores.parquet": pa.table(columns, schema)},
        metrics={name: float(np.concatenate(lists).mean()) for name, lists in scored.items()},
        environment=run.fleet.training.environment,
    )
