"""Step `eval`: one benchmark on one weight version.

The benchmark's `metric` computes its score from all samples, including failed ones. The mean reward of the graded
samples is reported too.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from cairn.configs.schema.evaluation import BenchmarkConfig, EngineOptions
from cairn.configs.schema.run import RunConfig
from cairn.engines.models.tokenizers import tokenizer_digest
from cairn.engines.processes.fingerprint import combined
from cairn.engines.types.trajectories import GeneratedSample
from cairn.engines.types.types import FinishReason
from cairn.storage.evals import Claim, Evaluation, EvaluationKey, look, read_samples
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.layout import commit_name
from cairn.storage.ledger.schemas import EVAL, GENERATED_EVAL, IMAGES, SEQUENCES, TRAJECTORIES, Status
from cairn.storage.logs.sample_log import SampleLog
from cairn.storage.records import Environment
from cairn.storage.store.errors import Damaged, LeaseLost, StoreError, StoreRefused
from cairn.tasks.batch.sequences import last_trajectory
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.step import Outcome, StepCall, changes, durable
from cairn.tasks.durable.versions import version_of
from cairn.tasks.evaluation.benchmarks import SCORE, measure
from cairn.tasks.evaluation.evaluated_rows import SAMPLES, Answers, evaluated_rows, evaluated_samples, found_answers
from cairn.tasks.evaluation.questions import Questions, own_questions
from cairn.tasks.generation.calls import call_tables
from cairn.tasks.generation.episodes import Calls
from cairn.tasks.generation.generation import generate_function, generate_samples
from cairn.tasks.generation.groups import (
    finished_samples,
    images_column,
    segments_value,
    status_of,
    trajectory_columns,
    without_unused,
)
from cairn.tasks.grading.graded import GradedSample
from cairn.tasks.grading.reward import given_samples, grade_benchmark, graded_again, messages_of
from cairn.tasks.grading.shaping import sampled_tokens
from cairn.tasks.rewards.grader import GRADER_OPTIONS, Grading
from cairn.tasks.trainer.sync import serve

# Sharing of results between the evaluations of runs and `evals/`.


SINGLE_TURN = "single_turn"


class Shared:
    """Result in `evals/` (`cairn.storage.evals`) that a run's evaluation takes, or leaves for others.

    | in `evals/` when the step begins | the step |
    |---|---|
    | a result with every sample graded, computed in the run's environment | takes it: nothing is sampled or graded |
    | another result | samples; that result stays the one that others see |
    | nothing, or what an ended process left | claims it, samples, stores its own result there, and then commits |
    | nothing, while another process computes it | samples too: a run waits for nobody |

    A result is stored there before the step's own commit: a step that is killed between the two finds it. Where an
    engine is batch-invariant, the step commits the same rows and metrics either way, because a result's key contains
    all else that they depend on. Elsewhere a result is as good as what the engine would sample now. The value `found`
    of a commit records that its samples came from `evals/`.

    Nothing is shared that a key does not determine: samples that go through user code, and servers that somebody else
    starts or that are of several kinds. A result with failed samples is not shared either, because they may succeed
    another time.
    """

    def __init__(self, step: StepCall, weights: Commit | None, questions: Questions, key: EvaluationKey) -> None:
        self._step, self._weights, self._questions = step, weights, questions
        self._key = key
        self._began = time.time()
        self.claim: Claim | None = None
        """Claim of the result; None where the result exists, or another process computes it."""

    @property
    def folder(self) -> str:
        """Store path of the result. It depends on the key alone."""
        return self._key.folder

    def taken(self, found: Evaluation) -> Answers | None:
        """Return the answers of a result; None where it must not be taken."""
        run = self._step.run
        if found.metrics.get("failed") != 0 or any(changes(found.environment, engines_environment(run))):
            return None
        rows = read_samples(self._step.attempt.store, found).to_pylist()
        seeds = [(one.group_id, one.index, one.seed) for one in self._questions.requests()]
        if seeds != [(row["prompt_index"], row["sample_index"], row["seed"]) for row in rows]:
            return None
        if any(row["log_probs"] is None for row in rows):  # it was taken over from a run that kept none
            return None
        origin = found.origin
        whose = f"run {origin['run']}" if "run" in origin else f"{origin.get('model', 'a model')}"
        run.emit(Message(f"{self._questions.name}: found in {self.folder}, evaluated for {whose}; nothing is sampled"))
        return found_answers(rows)

    def leave(self, answers: Answers, grader: Grading) -> None:
        """Store the step's answers as the result for others, unless a sample failed."""
        if any(one.reward is None for one in answers.graded):
            return
        if self.claim is None:  # whoever had it may have ended
            found = look(self._step.attempt.store, self._key)
            if isinstance(found, Claim):
                with found:
                    self._commit(found, answers, grader)
            return
        self._commit(self.claim, answers, grader)

    def _commit(self, claim: Claim, answers: Answers, grader: Grading) -> None:
        run, questions = self._step.run, self._questions
        rows = evaluated_rows(questions, questions.requests(), answers, grader.name, grader.version)
        attempt = claim.attempt()
        try:
            claim.commit(
                attempt,
                outputs=(attempt.write_table(SAMPLES, rows),),
                metrics=questions.measure(evaluated_samples(rows)),
                values=questions.described,
                origin=_origin(run, self._weights),
                timings={"run": time.time() - self._began},
                started_at=self._began,
                environment=engines_environment(run),
                adopted=f"{run.ledger.run}/{commit_name(self._step.iteration, Step.EVAL, self._step.shard)}",
            )
        except LeaseLost:  # this process was suspended meanwhile: another one makes the result
            attempt.discard()
        except Exception as error:
            if not isinstance(error, StoreError) or isinstance(error, StoreRefused):
                attempt.discard()
            raise


@contextmanager
def sharing(
    step: StepCall, weights: Commit | None, questions: Questions
) -> Iterator[tuple[Shared | None, Answers | None]]:
    """Yield the shared result, None where nothing is shared, and the answers to take from it, if it exists. `weights`:
    the train step that left the evaluated weights; None for the initial ones."""
    key = _key(step.run, weights, questions)
    if key is None:
        yield None, None
        return
    shared = Shared(step, weights, questions, key)
    try:
        found = look(step.attempt.store, key)
        if isinstance(found, Evaluation):
            answers = shared.taken(found)
    except Damaged as error:
        step.run.emit(Message(f"{questions.name}: {error}; it is skipped, see `cairn verify --evals`", "warning"))
        yield None, None
        return
    if isinstance(found, Evaluation):
        yield (shared, answers) if answers is not None else (None, None)
    elif isinstance(found, Claim):
        with found:
            shared.claim = found
            yield shared, None
    else:
        yield shared, None


def engines_environment(run: RunContext) -> Environment:
    """Return the combined environment of all rollout engines of a run."""
    return combined([run.fleet.generating_environment(engine) for engine in run.fleet.membership.serving()])


def _key(run: RunContext, weights: Commit | None, questions: Questions) -> EvaluationKey | None:
    """Return the key of the result; None where a key would not determine it."""
    rollout = run.config.rollout
    if rollout.custom_generate_function_path != SINGLE_TURN or rollout.server_groups or rollout.external_urls:
        return None
    options = EngineOptions.of_run(rollout, {})
    folder = run.config.model.path
    if weights is None:
        digest: object = _checksum(folder, options.dtype)
    else:
        synced = run.find(weights.iteration, Step.SYNC)
        digest = None if synced is None else synced.values.get("digest")
    if not isinstance(digest, str):
        return None
    return questions.key(digest, tokenizer_digest(run.tokenizer), options, folder)


def _origin(run: RunContext, weights: Commit | None) -> dict[str, Any]:
    origin: dict[str, Any] = {"run": run.ledger.run, "iteration": None, "weight_version": version_of(weights)}
    if weights is not None:
        synced = run.committed(weights.iteration, Step.SYNC)
        origin |= {"iteration": weights.iteration, "publication": f"{synced.run}/{synced.name}@{synced.digest}"}
    return origin


@cache
def _checksum(folder: str, dtype: Literal["float32", "bfloat16"]) -> str:
    """Return the checksum of the model that a run begins with. It is read once in a driver, which has compared the
    model with the run's digest."""
    from cairn.engines.weights.checksum import folder_checksum  # PyTorch takes seconds to import

    return folder_checksum(folder, dtype)


def initial_eval_due(config: RunConfig) -> bool:
    """Return whether the first iteration begins with an evaluation of the initial weights."""
    return config.eval.eval_interval is not None and not config.eval.skip_eval_before_train


def eval_due(config: RunConfig, iteration: int) -> bool:
    """Return whether the weights that the iteration leaves are evaluated."""
    interval = config.eval.eval_interval
    if interval is None:
        return False
    return (iteration + 1) % interval == 0 or iteration + 1 == config.rollout.num_rollout


def eval_shard(benchmark: BenchmarkConfig, version: int) -> str:
    """Return the shard's name in the commit. It has the version, because the first iteration may evaluate the initial
    weights and those that it leaves."""
    return f"{benchmark.name}-v{version:06d}"


@durable(
    Step.EVAL,
    reads=(
        "seed",
        "eval.benchmarks",
        *GRADER_OPTIONS,
        "rollout.rollout_stop_token_ids",
        "rollout.rollout_stop",
        "rollout.custom_generate_function_path",
        "rollout.tools",
        "rollout.tool_options",
        "rollout.tool_call_format",
        "rollout.max_turns",
        "rollout.rollout_max_context_len",
        "rollout.custom_generate_timeout",
        "rollout.episode_timeout",
    ),
    externals=("model", "eval", "reward_model", "search"),
    engines=("rollout",),
)
def evaluate(step: StepCall, weights: Commit | None, *, name: str) -> Outcome:
    """Sample and grade every prompt of the benchmark `name` with the weights that `weights` left, unless a shared
    result exists (`Shared`). Samples are durable as they finish: after a failure only the missing ones are generated,
    and all are graded."""
    run, version = step.run, version_of(weights)
    benchmark = next(b for b in run.config.eval.benchmarks if b.name == name)
    grader = run.benchmark_grader(name)
    # The random draws are equal at every evaluation, so differences come from the weights.
    questions = own_questions(
        benchmark,
        run.benchmark_data(name),
        seed=run.config.seed,
        stop_token_ids=run.config.rollout.rollout_stop_token_ids,
        stop=run.config.rollout.rollout_stop,
        graded_by=f"{grader.name} {grader.version}",
    )
    with sharing(step, weights, questions) as (shared, found):
        answers = found or _answers(step, weights, questions, grader)
        if shared is not None and found is None:
            shared.leave(answers, grader)
    samples, graded, requests = answers.samples, answers.graded, questions.requests()
    asked = [questions.rows[sample["group_id"]] for sample in samples]
    failed = [g.reward is None for g in graded]
    measured = measure(
        benchmark.metric,
        [
            GradedSample(
                text,
                row.label,
                row.metadata or {},
                response_ids=tuple(_graded_ids(sample)),
                prompt=row.prompt_text,
                prompt_ids=row.prompt_ids,
                finish_reason=sample["finish_reason"],
                status=str(Status.FAILED if g.reward is None else status_of(sample["finish_reason"])),
                group_id=row.index,
                sample_index=sample["sample_index"],
                prompt_index=row.index,
                reward=g.reward,
                components=g.components or {},
                error=g.error,
            )
            for sample, text, row, g in zip(samples, answers.texts, asked, graded, strict=True)
        ],
    )
    rewards = [g.reward for g in graded if g.reward is not None]
    generated = [sample for sample in samples if sample["error"] is None]  # no response, no length
    lengths = np.asarray([sampled_tokens(len(one["response_ids"]), one["segments"]) for one in generated])
    truncated = [sample["finish_reason"] == FinishReason.LENGTH for sample in generated]
    responses = (
        {
            f"{name}-truncated_ratio": float(np.mean(truncated)),
            f"eval/{name}/response_len/mean": float(lengths.mean()),
            f"eval/{name}/response_len/max": int(lengths.max()),
        }
        if generated
        else {}
    )
    table = pa.table(
        {
            "benchmark": [name] * len(graded),
            "prompt_index": [row.index for row in asked],
            "sample_index": [sample["sample_index"] for sample in samples],
            "prompt_text": [row.prompt_text for row in asked],
            "response_text": answers.texts,
            "response_ids": [sample["response_ids"] for sample in samples],
            "log_probs": [sample["log_probs"] for sample in samples],
            "segments": [sample["segments"] for sample in samples],
            "reward": [g.reward for g in graded],
            "label": [row.label for row in asked],
            "finish_reason": [sample["finish_reason"] for sample in samples],
            "status": [
                str(Status.FAILED if bad else status_of(sample["finish_reason"]))
                for bad, sample in zip(failed, samples, strict=True)
            ],
            "error": [g.error for g in graded],
            "seed": [request.seed for request in requests],
            "weight_version": [version] * len(samples),
            **{field.name: [sample[field.name] for sample in samples] for field in SEQUENCES},
        },
        pa.schema([*EVAL, *SEQUENCES]),
    )
    if any(row.images for row in asked):
        table = table.append_column(IMAGES, images_column(asked))
    return Outcome(
        tables={"samples.parquet": without_unused(table), **answers.beside},
        values={"benchmark": name, **({"found": shared.folder} if shared is not None and found is not None else {})},
        metrics={
            name: measured.pop(SCORE),
            **({f"{name}-graded": float(np.mean(rewards))} if rewards else {}),
            **{f"eval/{name}/metric/{metric}": value for metric, value in measured.items()},
            f"{name}-failed_samples": sum(failed),
            f"{name}-graded_again": graded_again(graded),
            **responses,
        },
        timings={"grader_wait": max((g.waited for g in graded), default=0.0)},
        weight_version_in=version,
        weight_version_out=version,
        environment=engines_environment(run),
    )


def _answers(step: StepCall, weights: Commit | None, questions: Questions, grader: Grading) -> Answers:
    run = step.run
    rows, beside = _generate(step, weights, questions)
    samples = rows.to_pylist()
    texts = run.tokenizer.batch_decode([_graded_ids(sample) for sample in samples], skip_special_tokens=True)
    asked = [questions.rows[sample["group_id"]] for sample in samples]
    columns = {
        "response_text": texts,
        "label": [row.label for row in asked],
        "metadata": [row.metadata or {} for row in asked],
        "response_ids": [sample["response_ids"] for sample in samples],
        "prompt_text": [row.prompt_text for row in asked],
        "messages": [messages_of(row) for row in asked],
        "prompt_ids": [row.prompt_ids for row in asked],
        "finish_reason": [sample["finish_reason"] for sample in samples],
        "status": [status_of(sample["finish_reason"]) for sample in samples],
        "segments": [sample["segments"] for sample in samples],
        **{field.name: [sample[field.name] for sample in samples] for field in SEQUENCES},
    }
    given = given_samples(grader, run.tokenizer, columns)
    errors, groups = ([sample[name] for sample in samples] for name in ("error", "group_id"))
    return Answers(samples, texts, grade_benchmark(grader, given, errors, groups), beside)


def _graded_ids(sample: Mapping[str, Any]) -> Sequence[int]:
    """Return the response tokens to grade: those of the last trajectory."""
    return last_trajectory(sample["response_ids"], sample[TRAJECTORIES.name])


def _generate(step: StepCall, weights: Commit | None, questions: Questions) -> tuple[pa.Table, dict[str, pa.Table]]:
    """Return all samples, and the tables of their recorded calls by file name. The prompts are dealt out over the
    rollout engines. Samples that an earlier attempt finished are in the log, and are not generated again."""
    engines = step.run.fleet.membership.serving()
    earlier = step.earlier_digests
    requests, records = questions.requests(), generate_function(step.run).records
    scope = f"eval/{step.iteration}/{step.shard}"
    with (
        SampleLog(
            step.attempt, step.input_digest, schema=GENERATED_EVAL, encode=_table, earlier_digests=earlier
        ) as log,
        nullcontext(log.recover()) as recovered,  # before calls are read
        Calls(step, records=records, scope=scope) as calls,
    ):
        finished, _ = finished_samples(recovered)
        missing = [request for request in requests if request.key not in finished]
        prompts = list(dict.fromkeys(request.group_id for request in missing))

        def on_engine(index: int) -> None:
            share = {prompt: prompt for prompt in prompts[index :: len(engines)]}
            asked = [request for request in missing if request.group_id in share]
            if asked:
                serve(step.run, engines[index], weights)
            for generated in generate_samples(
                step, engines[index], weights, asked, questions.sampling, rows=share, calls=calls
            ):
                calls.after(partial(log.append, *generated))

        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(on_engine, range(len(engines))))
        made = calls.table()
        rows = pa.concat_tables([recovered, log.appended()])
    rows = rows.sort_by([("group_id", "ascending"), ("sample_index", "ascending")])
    return rows, {} if made is None else call_tables(made, rows.slice(0, 0))


def _table(samples: Sequence[GeneratedSample]) -> pa.Table:
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
