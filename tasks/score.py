"""`score`: log-probs of the kept samples under the old policy, the reference and the teacher, and the critic's values,
where the algorithm needs them. The training engine has all of these models, or a server has the teacher: that one is
asked while the engine scores, and never again once the step is committed."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.configs.schema.run import RunConfig
from cairn.engines.scoring.client import ServedModel
from cairn.engines.training.needs import scores_needed
from cairn.engines.types import ModelRole, TrainBatch
from cairn.storage.commits import Commit, Step
from cairn.storage.schemas import SCORE
from cairn.tasks.batch import mean_of_trained, rows_of_groups, train_batch
from cairn.tasks.context import RunContext
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
    served = needed.get("teacher_log_probs") if config.model.teacher_url is not None else None
    of_engine = {column: role for column, role in needed.items() if role != served}
    with _asking(_served_teacher(run) if served else None, batch) as asked:
        scored = _by_the_engine(run, weights, batch, of_engine)
        if asked is not None:
            scored["teacher_log_probs"] = asked.result()
    scored = {names[column]: of_samples(batch, scored[column]) for column in needed}
    keys = pa.concat_tables(rows_of_groups(run, selection, rollouts, []))
    columns: dict[str, Any] = {name: keys.column(name) for name in ("group_id", "sample_index")}
    nothing = dict.fromkeys(("log_probs", "ref_log_probs"), [None] * keys.num_rows)
    columns |= {name: pa.array(lists, SCORE.field(name).type) for name, lists in {**nothing, **scored}.items()}
    schema = pa.schema([field for field in SCORE if field.name in columns])
    return Outcome(
        tables={"scores.parquet": pa.table(columns, schema)},
        metrics={name: mean_of_trained(lists, of_samples(batch, batch.loss_mask)) for name, lists in scored.items()},
        environment=run.fleet.training.environment,
    )


def _by_the_engine(
    run: RunContext, weights: Commit | None, batch: TrainBatch, needed: Mapping[str, ModelRole]
) -> dict[str, list[np.ndarray]]:
    """Columns of the batch's sequences by the models of the training engine."""
    if not needed:
        return {}
    with run.weights_lock:
        prepare_trainer(run, weights)
        return {column: run.fleet.training.score(batch, role) for column, role in needed.items()}


@contextmanager
def _asking(teacher: ServedModel | None, batch: TrainBatch) -> "Iterator[Future[list[np.ndarray]] | None]":
    """What a teacher behind a server says, in a thread; it is not waited for where the body fails."""
    if teacher is None:
        yield None
        return
    with ThreadPoolExecutor(1, "teacher") as pool:
        try:
            yield pool.submit(teacher.log_probs, batch)
        except BaseException:
            teacher.abort()
            raise


def _served_teacher(run: RunContext) -> ServedModel:
    model = run.config.model
    assert model.teacher_url is not None
    assert model.teacher_name is not None
    return ServedModel(
        model.teacher_url,
        model.teacher_api,
        model.teacher_name,
        timeout=model.teacher_timeout,
        concurrency=model.teacher_concurrency,
        spell=lambda token: str(run.tokenizer.decode([token])),
    )
