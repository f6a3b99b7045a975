"""Step `score`: log-probs of the kept samples under the old policy, the reference and the teacher, and the critic's
values, where the algorithm needs them.

The training engine has all of these models, except a teacher behind a server. That one is called while the engine
scores, and never again once the step is committed.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.configs.schema.run import RunConfig
from cairn.engines.scoring.client import ServedModel
from cairn.engines.training.needs import scores_needed, teacher_top_k
from cairn.engines.training.top_k import split_rows
from cairn.engines.types.types import ModelRole, TrainBatch
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.schemas import SCORE
from cairn.tasks.batch.batch import mean_of_trained, rows_column, rows_of_groups, train_batch
from cairn.tasks.batch.sequences import join_by_sample
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.trainer.recovery import prepare_trainer

TOP = ("teacher_top_log_probs", "teacher_top_ids")
"""Columns with a row of numbers for each token."""


def needs_scores(config: RunConfig) -> bool:
    """Return whether an iteration has a score step at all."""
    return bool(scores_needed(config.algorithm, config.training.num_steps_per_rollout))


@durable(Step.SCORE, externals=("model", "ref_model", "teacher_model", "critic_model"), engines=("training",))
def score(step: StepCall, weights: Commit | None, selection: Commit, rollouts: list[Commit]) -> Outcome:
    """Score every trained sample, in the order of the batch."""
    run, config = step.run, step.run.config
    batch = train_batch(run, selection, rollouts)
    needed = scores_needed(config.algorithm, config.training.num_steps_per_rollout)
    top_k, roles = teacher_top_k(config.algorithm), dict.fromkeys(needed.values())
    served = "teacher" if "teacher" in roles and config.model.teacher_url is not None else None
    with _served_scores(_served_teacher(run, top_k) if served else None, batch) as future:
        by_role = _engine_scores(run, weights, batch, [role for role in roles if role != served])
        if future is not None:
            by_role["teacher"] = future.result()
    by_column = {column: by_role[role] for column, role in needed.items()}
    if top_k:
        from cairn.engines.models.folders import check_model_folder  # PyTorch takes seconds to import

        outputs = check_model_folder(config.model.path).get_text_config().vocab_size
        rows = split_rows(by_role["teacher"], top_k, min(len(run.tokenizer), outputs))
        by_column |= {name: rows[name] for name in rows if name != "teacher_log_probs" or name in needed}
    names = {column: "log_probs" if column == "old_log_probs" else column for column in by_column}
    scored = {names[column]: join_by_sample(batch, values) for column, values in by_column.items()}
    masks = join_by_sample(batch, batch.loss_mask)
    keys = pa.concat_tables(rows_of_groups(run, selection, rollouts, []))
    columns: dict[str, Any] = {name: keys.column(name) for name in ("group_id", "sample_index")}
    nothing: dict[str, Any] = dict.fromkeys(("log_probs", "ref_log_probs"), [None] * keys.num_rows)
    for name, lists in {**nothing, **scored}.items():
        columns[name] = (rows_column if name in TOP else pa.array)(lists, SCORE.field(name).type)
    schema = pa.schema([field for field in SCORE if field.name in columns])
    return Outcome(
        tables={"scores.parquet": pa.table(columns, schema)},
        metrics={name: mean_of_trained(lists, masks) for name, lists in scored.items() if name not in TOP},
        environment=run.fleet.training.environment,
    )


def _engine_scores(
    run: RunContext, weights: Commit | None, batch: TrainBatch, roles: Sequence[ModelRole]
) -> dict[ModelRole, list[np.ndarray]]:
    """Return the scores of the batch's sequences under models of the training engine, by role."""
    if not roles:
        return {}
    with run.weights_lock:
        prepare_trainer(run, weights)
        return {role: run.fleet.training.score(batch, role) for role in roles}


@contextmanager
def _served_scores(teacher: ServedModel | None, batch: TrainBatch) -> "Iterator[Future[list[np.ndarray]] | None]":
    """Yield the future scores of a teacher behind a server, computed in a thread; None without one. If the body fails,
    the calls are aborted."""
    if teacher is None:
        yield None
        return
    with ThreadPoolExecutor(1, "teacher") as pool:
        try:
            yield pool.submit(teacher.log_probs, batch)
        except BaseException:
            teacher.abort()
            raise


def _served_teacher(run: RunContext, top_k: int) -> ServedModel:
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
        top_k=top_k,
    )
