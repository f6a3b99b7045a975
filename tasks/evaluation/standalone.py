"""Evaluation of one benchmark on one model, outside of all runs. Its result is a commit of its own
(`cairn.storage.evals`).

    questions → samples, durable as they finish → grades → metrics → the result
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import pyarrow as pa

from cairn.engines.agents.episodes.user_code import SINGLE_TURN as ONE_CALL
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.types.errors import GenerationFailed
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleRequest
from cairn.engines.types.types import SamplingParams
from cairn.storage.evals import Claim, Evaluation
from cairn.storage.ledger.schemas import GENERATED_EVALUATION
from cairn.storage.ledger.snapshots import AttemptFolder
from cairn.storage.logs.sample_log import SampleLog
from cairn.storage.records import Environment
from cairn.storage.store.errors import StoreError, StoreRefused
from cairn.tasks.evaluation.evaluated_rows import SAMPLES, Answers, evaluated_rows, evaluated_samples
from cairn.tasks.evaluation.questions import Questions
from cairn.tasks.generation.generation import Engine
from cairn.tasks.generation.groups import finished_samples, status_of
from cairn.tasks.grading.opening import open_grader
from cairn.tasks.grading.reward import given_samples, grade_benchmark, messages_of
from cairn.tasks.rewards.grader import Grading

ORDER = [("group_id", "ascending"), ("sample_index", "ascending")]
SINGLE_TURN = GenerateFunction(ONE_CALL)

Progress = Callable[[int, int], None]
"""Function that receives the number of finished samples and of all samples."""


@dataclass(frozen=True)
class Engines:
    """Rollout engines that serve the evaluated weights."""

    engines: Sequence[Engine]
    environment: Callable[[], Environment]
    """Returns their environment; called after they have generated."""


@dataclass(frozen=True)
class Sampled:
    """Existing samples for all requests, in their order."""

    samples: Sequence[Mapping[str, Any]]
    """Columns of `GENERATED_EVALUATION`; null where a value is not known."""
    environment: Environment
    """Environment that sampled them."""
    commit: str
    """Commit that holds them: `cairn.storage.evals.Evaluation.adopted`."""


def compute(
    claim: Claim,
    questions: Questions,
    tokenizer: Any,
    engines: Callable[[], Engines],
    origin: Mapping[str, Any],
    here: Environment,
    progress: Progress = lambda done, total: None,
    sampled: Sampled | None = None,
) -> Evaluation:
    """Compute and commit the claimed result.

    Samples that an earlier attempt finished are not sampled again, and without missing samples no engine is requested.
    Raises what engines, grader and store raise; finished samples stay.

    Args:
        here: environment of this process, where graders compute.
        sampled: samples to grade instead of new ones.
    """
    started_at, began = time.time(), time.perf_counter()
    attempt = claim.attempt()
    try:
        requests = questions.requests()
        if sampled is None:
            table, environment = _generate(attempt, claim, questions, requests, engines, here, progress)
            samples: Sequence[Mapping[str, Any]] = table.to_pylist()
        else:
            samples, environment = sampled.samples, sampled.environment
        generated = time.perf_counter()
        assert questions.grader is not None
        with closing(open_grader(questions.grader, store=attempt.store)) as grader:
            rows = _graded(grader, questions, requests, tokenizer, samples)
        graded = time.perf_counter()
        metrics = dict(questions.measure(evaluated_samples(rows)))
        output = attempt.write_table(SAMPLES, rows)
    except Exception as error:
        if not isinstance(error, StoreError) or isinstance(error, StoreRefused):
            attempt.discard()
        raise
    return claim.commit(
        attempt,
        outputs=(output,),
        metrics=metrics,
        values=dict(questions.described),
        origin=origin,
        timings={"generate": generated - began, "grade": graded - generated, "run": time.perf_counter() - began},
        started_at=started_at,
        environment=environment,
        adopted=None if sampled is None else sampled.commit,
    )


def _generate(
    attempt: AttemptFolder,
    claim: Claim,
    questions: Questions,
    requests: Sequence[SampleRequest],
    engines: Callable[[], Engines],
    here: Environment,
    progress: Progress,
) -> tuple[pa.Table, Environment]:
    """Return all samples in the order of the questions, including those of earlier attempts, and their environment."""
    with SampleLog(attempt, claim.key.digest, schema=GENERATED_EVALUATION, encode=_table) as log:
        recovered = log.recover()
        finished, _ = finished_samples(recovered)
        missing = [request for request in requests if request.key not in finished]
        done = len(requests) - len(missing)
        progress(done, len(requests))
        if not missing:
            return recovered.sort_by(ORDER), here
        opened = engines()
        shares: list[list[SampleRequest]] = [[] for _ in opened.engines]
        for place, (_, samples) in enumerate(groupby(missing, key=lambda request: request.group_id)):
            shares[place % len(shares)] += samples

        def on_engine(engine: Engine, share: Sequence[SampleRequest]) -> None:
            nonlocal done
            for samples in _samples(engine, share, questions.sampling):
                log.append(*samples)
                done += len(samples)
                progress(done, len(requests))

        with ThreadPoolExecutor(len(shares)) as pool:
            list(pool.map(on_engine, opened.engines, shares))
        rows = pa.concat_tables([recovered, log.appended()])
    return rows.sort_by(ORDER), opened.environment()


def _samples(
    engine: Engine, requests: Sequence[SampleRequest], params: SamplingParams
) -> Iterator[list[GeneratedSample]]:
    """Yield samples as they end. If the engine fails on the requests, each of the remaining ones is tried alone, once.
    A request on which the engine then fails becomes a failed sample. Nothing else fails a sample."""
    left = {request.key: request for request in requests}
    with suppress(GenerationFailed):
        for ended in _ended(engine, requests, params) if requests else ():
            for sample in ended:
                del left[sample.key]
            yield ended
    for request in left.values():
        try:
            alone = list(chain.from_iterable(_ended(engine, [request], params)))
        except GenerationFailed as error:
            alone = [GeneratedSample.failed(request, f"{type(error).__name__}: {error}")]
        yield alone


def _ended(
    engine: Engine, requests: Sequence[SampleRequest], params: SamplingParams
) -> Iterator[list[GeneratedSample]]:
    for told in engine.generate_samples(requests, params, SINGLE_TURN):
        assert not isinstance(told, Recorded)  # of one call nothing is
        yield told


def _table(samples: Sequence[GeneratedSample]) -> pa.Table:
    return pa.table(
        {
            "group_id": [sample.group_id for sample in samples],
            "sample_index": [sample.index for sample in samples],
            "response_ids": [sample.trajectory.response_ids for sample in samples],
            "log_probs": [sample.trajectory.log_probs for sample in samples],
            "finish_reason": [str(sample.finish_reason) for sample in samples],
            "error": [sample.error for sample in samples],
            "seconds": [sample.trajectory.seconds for sample in samples],
        },
        GENERATED_EVALUATION,
    )


def _graded(
    grader: Grading,
    questions: Questions,
    requests: Sequence[SampleRequest],
    tokenizer: Any,
    samples: Sequence[Mapping[str, Any]],
) -> pa.Table:
    """Return the rows of the result for samples in the order of their requests."""
    by_index = {row.index: row for row in questions.rows}
    asked = [by_index[request.group_id] for request in requests]
    ids = [sample["response_ids"] for sample in samples]
    texts = [str(text) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)] if ids else []
    columns: dict[str, Sequence[Any]] = {
        "response_text": [questions.graded_part(text) for text in texts],
        "label": [row.label for row in asked],
        "metadata": [row.metadata or {} for row in asked],
        "response_ids": ids,
        "prompt_text": [row.prompt_text for row in asked],
        "messages": [messages_of(row) for row in asked],
        "prompt_ids": [row.prompt_ids for row in asked],
        "finish_reason": [sample["finish_reason"] for sample in samples],
        "status": [status_of(sample["finish_reason"]) for sample in samples],
        "segments": [None] * len(samples),
        "trajectories": [None] * len(samples),
    }
    given, errors = given_samples(grader, tokenizer, columns), [sample["error"] for sample in samples]
    graded = grade_benchmark(grader, given, errors, [request.group_id for request in requests])
    return evaluated_rows(questions, requests, Answers(samples, texts, graded), grader.name, grader.version)
