"""Step `score`: log-probs of the kept samples under the old policy, the reference and the teacher, and the critic's
values, where the algorithm needs them.

The training engine has all of these models, except a teacher behind a server. That one is called while the engine
scores, and never again once the step is committed.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from cairn.configs.schema.run import RunConfig
from cairn.engines.scoring.client import ServedModel
from cairn.engines.training.needs import scores_needed, teacher_top_k
from cairn.engines.types.types import ModelRole, TrainBatch
from cairn.storage.ledger.commits import Commit, Step
from cairn.tasks.batch.batch import rows_of_groups
from cairn.tasks.batch.scores import FILE, ScoreColumns, ScoreFile
from cairn.tasks.batch.sequences import join_by_sample
from cairn.tasks.batch.source import snapshot_batch, train_batch
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.trainer.recovery import prepare_trainer


def needs_scores(config: RunConfig) -> bool:
    """Return whether an iteration has a score step at all."""
    return bool(scores_needed(config.algorithm, config.training.num_steps_per_rollout))


@durable(Step.SCORE, externals=("model", "ref_model", "teacher_model", "critic_model"), engines=("training",))
def score(step: StepCall, weights: Commit | None, selection: Commit, rollouts: list[Commit]) -> Outcome:
    """Score every trained sample, in the order of the batch.

    The training ranks read the samples, and the first one writes the scores. The driver does both where a served
    teacher answers to it, and where the attempt is in a store of its own, as in a replay.
    """
    run, config = step.run, step.run.config
    needed = scores_needed(config.algorithm, config.training.num_steps_per_rollout)
    top_k, roles = teacher_top_k(config.algorithm), list(dict.fromkeys(needed.values()))
    columns = ScoreColumns(needed, top_k, _vocabulary(run) if top_k else 0)
    served = "teacher" if "teacher" in roles and config.model.teacher_url is not None else None
    if served or step.attempt.store.url != run.ledger.store.url:
        batch = train_batch(run, selection, rollouts)
        with _served_scores(_served_teacher(run, top_k) if served else None, batch) as future:
            scores = _engine_scores(run, weights, batch, [role for role in roles if role != served])
            if future is not None:
                scores["teacher"] = future.result()
        samples = pa.concat_tables(rows_of_groups(run, selection, rollouts, []))
        keys = list(zip(*(samples.column(name).to_pylist() for name in ("group_id", "sample_index")), strict=True))
        table, metrics = columns.table(keys, batch, join_by_sample(batch, batch.loss_mask), scores)
        return Outcome(tables={FILE: table}, metrics=metrics, environment=run.fleet.training.environment)
    source = snapshot_batch(run, selection, rollouts, masks=True)
    with run.weights_lock:
        prepare_trainer(run, weights)
        file, metrics = run.fleet.training.write_scores(source, roles, ScoreFile.of(columns, step.attempt))
    return Outcome(files=[file], metrics=metrics, environment=run.fleet.training.environment)


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


def _vocabulary(run: RunContext) -> int:
    """Return the number of tokens that both the tokenizer and the policy know."""
    from cairn.engines.models.folders import check_model_folder  # PyTorch takes seconds to import

    outputs = check_model_folder(run.config.model.path).get_text_config().vocab_size
    return min(len(run.tokenizer), int(outputs))


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
