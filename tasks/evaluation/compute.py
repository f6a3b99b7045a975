"""Computation of an evaluation. A run's step `eval` and evaluations outside of runs share it; only their engines
differ.

    questions → samples, durable as they finish → grades → rows → metrics
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.engines.agents.episodes.user_code import SINGLE_TURN, GenerateFunction
from cairn.engines.types.errors import GenerationFailed
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleRequest
from cairn.engines.types.types import SamplingParams
from cairn.storage.evals import Claim, Evaluation
from cairn.storage.ledger.schemas import EVALUATED, GENERATED_EVAL, GRADED_EVAL, TRAJECTORIES, Status
from cairn.storage.ledger.snapshots import AttemptFolder
from cairn.storage.logs.sample_log import SampleLog
from cairn.storage.records import Environment
from cairn.storage.store.canonical import from_json
from cairn.tasks.batch.batch import arrays
from cairn.tasks.batch.sequences import last_trajectory
from cairn.tasks.evaluation.questions import Questions
from cairn.tasks.generation.groups import finished_samples, segments_value, status_of, trajectory_columns
from cairn.tasks.grading.graded import GradedSample
from cairn.tasks.grading.opening import open_grader
from cairn.tasks.grading.reward import grade_benchmark, grader_samples, messages_of
from cairn.tasks.rewards.grader import Graded, Grading

SAMPLES = "samples.parquet"
"""Name of the file with the rows."""

# Samples, durable as they finish.


@dataclass(frozen=True)
class Generation:
    """Samples of an evaluation, those of earlier attempts included."""

    log: SampleLog
    """Receives samples as they finish."""
    recovered: pa.Table
    missing: Sequence[SampleRequest]
    """Requests for the samples that no earlier attempt finished, question after question."""

    def samples(self) -> pa.Table:
        """Return all samples in the order of the requests, once they are durable. Closes the log."""
        rows = pa.concat_tables([self.recovered, self.log.appended()])
        return rows.sort_by([("group_id", "ascending"), ("sample_index", "ascending")])


@contextmanager
def generation(
    attempt: AttemptFolder, inputs_digest: str, questions: Questions, earlier_digests: frozenset[str] = frozenset()
) -> Iterator[Generation]:
    """Open the log of an evaluation's samples, and recover what earlier attempts finished. For the arguments see
    `SampleLog`."""
    with SampleLog(
        attempt, inputs_digest, schema=GENERATED_EVAL, encode=_generated, earlier_digests=earlier_digests
    ) as log:
        recovered = log.recover()
        finished, _ = finished_samples(recovered)
        yield Generation(log, recovered, [one for one in questions.requests() if one.key not in finished])


def _generated(samples: Sequence[GeneratedSample]) -> pa.Table:
    """Return rows of samples, without columns that only trained tokens have."""
    return pa.table(
        {
            "group_id": [sample.group_id for sample in samples],
            "sample_index": [sample.index for sample in samples],
            "response_ids": [sample.trajectory.response_ids for sample in samples],
            "log_probs": [sample.trajectory.log_probs for sample in samples],
            "segments": [segments_value(sample) for sample in samples],
            "finish_reason": [str(sample.finish_reason) for sample in samples],
            "error": [sample.error for sample in samples],
            "seconds": [sample.trajectory.seconds for sample in samples],
            **trajectory_columns(samples),
        },
        GENERATED_EVAL,
    )


# Grades and metrics.


def grade(grader: Grading, questions: Questions, tokenizer: Any, generated: pa.Table) -> tuple[pa.Table, list[Graded]]:
    """Grade all samples of an evaluation, which have the schema GENERATED_EVAL and the order of the requests. Return
    rows with the schema GRADED_EVAL, and the grades. If a sample has several trajectories, the last one is graded."""
    samples = generated.drop_columns(["response_ids", "log_probs"]).to_pydict()
    rows = [questions.rows[index] for index in samples["group_id"]]
    samples["response_ids"] = arrays(generated, "response_ids")
    last = map(last_trajectory, samples["response_ids"], samples[TRAJECTORIES.name])
    texts = [str(text) for text in tokenizer.batch_decode(list(last), skip_special_tokens=True)]
    prompts = {row.index: np.asarray(row.prompt_ids, np.int32) for row in questions.rows}
    samples |= {
        "prompt_text": [row.prompt_text for row in rows],
        "prompt_ids": [prompts[row.index] for row in rows],
        "label": [row.label for row in rows],
        "status": [status_of(reason) for reason in samples["finish_reason"]],
    }
    seen = {
        "response_text": [questions.graded_part(text) for text in texts],
        "metadata": [row.metadata or {} for row in rows],
        "messages": [messages_of(row) for row in rows],
    }
    grader_inputs = grader_samples(grader, tokenizer, samples | seen)
    graded = grade_benchmark(grader, grader_inputs, samples["error"], samples["group_id"])
    answers = [(one.components or {}).get("answer") for one in graded]
    columns = samples | {
        "benchmark": [questions.name] * len(rows),
        "prompt_index": samples["group_id"],
        "prompt_id": [str((row.metadata or {}).get("id", row.index)) for row in rows],
        "response_text": texts,
        "answer": [None if answer is None else str(answer) for answer in answers],
        "reward": [one.reward for one in graded],
        "components": [None if one.components is None else _json(one.components) for one in graded],
        "metadata": [_json(row.metadata) if row.metadata else None for row in rows],
        "grader": [one.grader or grader.name for one in graded],
        "grader_version": [one.version or grader.version for one in graded],
        "status": [
            str(Status.FAILED if one.reward is None else status)
            for one, status in zip(graded, samples["status"], strict=True)
        ],
        "error": [one.error for one in graded],
        "seed": [request.seed for request in questions.requests()],
        **{name: generated.column(name) for name in ("response_ids", "log_probs")},
    }
    return pa.table({name: columns[name] for name in GRADED_EVAL.names}, GRADED_EVAL), graded


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, default=str)  # a row may have dates


def evaluated_samples(questions: Questions, rows: pa.Table) -> list[GradedSample]:
    """Return rows with the schema GRADED_EVAL as the benchmark's metrics take them. The tokens are a tuple for a metric
    of the user's, and an array for a built-in one, which reads no more than their number."""
    is_own = "." in (questions.metric or "")

    def response_ids(ids: np.ndarray, lengths: Sequence[int] | None) -> Any:
        ids = np.asarray(last_trajectory(ids, lengths))
        return tuple(ids.tolist()) if is_own else ids

    columns = rows.drop_columns(["response_ids", "log_probs"]).to_pylist()
    return [
        GradedSample(
            row["response_text"],
            row_data.label,
            row_data.metadata or {},
            response_ids=response_ids(ids, row[TRAJECTORIES.name]),
            prompt=row_data.prompt_text,
            prompt_ids=row_data.prompt_ids,
            finish_reason=row["finish_reason"],
            status=row["status"],
            group_id=row_data.index,
            sample_index=row["sample_index"],
            prompt_index=row_data.index,
            reward=row["reward"],
            components={} if row["components"] is None else from_json(row["components"]),
            error=row["error"],
        )
        for row, ids in zip(columns, arrays(rows, "response_ids"), strict=True)
        for row_data in [questions.rows[row["prompt_index"]]]
    ]


# Evaluation of one benchmark on one model, outside of all runs.

Progress = Callable[[int, int], None]
"""Function that receives the number of finished samples and of all samples."""
Generate = Callable[
    [Sequence[SampleRequest], SamplingParams, GenerateFunction], Iterator[list[GeneratedSample] | Recorded]
]
"""Method `generate` of `cairn.engines.agents.episodes.samples.SampleEngine`."""


@dataclass(frozen=True)
class Served:
    """A rollout engine that serves the evaluated weights."""

    generate: Generate
    environment: Callable[[], Environment]
    """Returns its environment; called after it has generated."""


@dataclass(frozen=True)
class Sampled:
    """Existing samples for all requests, in their order."""

    samples: pa.Table
    """Rows with the schema GENERATED_EVAL; null where a value is not known."""
    environment: Environment
    """Environment that sampled them."""
    commit: str
    """Commit that holds them: `cairn.storage.evals.Evaluation.adopted`."""


def compute(
    claim: Claim,
    questions: Questions,
    tokenizer: Any,
    engine: Callable[[], Served],
    origin: Mapping[str, Any],
    here: Environment,
    progress: Progress = lambda done, total: None,
    sampled: Sampled | None = None,
) -> Evaluation:
    """Compute and commit the claimed result.

    Samples that an earlier attempt finished are not sampled again, and without missing samples no engine is requested.
    Raises what engine, grader and store raise; finished samples stay.

    Args:
        here: environment of this process, where graders compute.
        sampled: samples to grade instead of new ones.
    """
    started_at, began = time.time(), time.perf_counter()
    attempt = claim.attempt()
    with attempt.discarded_on_failure():
        if sampled is None:
            samples, environment = _generate(attempt, claim, questions, engine, here, progress)
        else:
            samples, environment = sampled.samples, sampled.environment
        generated = time.perf_counter()
        assert questions.grader is not None
        with closing(open_grader(questions.grader, store=attempt.store, args=questions.args)) as grader:
            rows, _ = grade(grader, questions, tokenizer, samples)
        graded = time.perf_counter()
    return commit_result(
        claim,
        attempt,
        questions,
        rows,
        origin=origin,
        timings={"generate": generated - began, "grade": graded - generated, "run": time.perf_counter() - began},
        started_at=started_at,
        environment=environment,
        adopted=None if sampled is None else sampled.commit,
    )


def commit_result(
    claim: Claim, attempt: AttemptFolder, questions: Questions, rows: pa.Table, **described: Any
) -> Evaluation:
    """Commit rows with the schema GRADED_EVAL as the claimed result. `described`: further arguments of
    `Claim.commit`."""
    with attempt.discarded_on_failure():  # but not once the result may be there, which names the table
        table = attempt.write_table(SAMPLES, rows.select(EVALUATED.names))
        metrics = questions.measure(evaluated_samples(questions, rows))
    return claim.commit(attempt, outputs=(table,), metrics=metrics, values=questions.described, **described)


def _generate(
    attempt: AttemptFolder,
    claim: Claim,
    questions: Questions,
    engine: Callable[[], Served],
    here: Environment,
    progress: Progress,
) -> tuple[pa.Table, Environment]:
    """Return all samples in the order of the questions, including those of earlier attempts, and their environment."""
    with generation(attempt, claim.key.digest, questions) as generated:
        total = generated.recovered.num_rows + len(generated.missing)
        done = total - len(generated.missing)
        progress(done, total)
        if not generated.missing:
            return generated.samples(), here
        served = engine()
        for samples in _samples(served.generate, generated.missing, questions.sampling):
            generated.log.append(*samples)
            done += len(samples)
            progress(done, total)
        return generated.samples(), served.environment()


def _samples(
    generate: Generate, requests: Sequence[SampleRequest], params: SamplingParams
) -> Iterator[list[GeneratedSample]]:
    """Yield samples as they end. If the engine fails on the requests, each of the remaining ones is tried alone, once.
    A request on which the engine then fails becomes a failed sample. Nothing else fails a sample."""

    def ended(requests: Sequence[SampleRequest]) -> Iterator[list[GeneratedSample]]:
        for message in generate(requests, params, GenerateFunction(SINGLE_TURN)):
            assert not isinstance(message, Recorded)  # a single call is not recorded
            yield message

    left = {request.key: request for request in requests}
    with suppress(GenerationFailed):
        for samples in ended(requests):
            for sample in samples:
                del left[sample.key]
            yield samples
    for request in left.values():
        try:
            yield list(chain.from_iterable(ended([request])))
        except GenerationFailed as error:
            yield [GeneratedSample.failed(request, f"{type(error).__name__}: {error}")]
