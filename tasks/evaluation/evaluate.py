"""Step `eval`: one benchmark on one weight version.

The benchmark's `metric` computes its score from all samples, including failed ones. The mean reward of the graded
samples is reported too.

The step shares its result with all other evaluations of a store (`cairn.storage.evals`):

| in `evals/` when the step begins | the step |
|---|---|
| a result with every sample graded, computed in the run's environment | takes it: nothing is sampled or graded |
| another result | samples; that result stays the one that others see |
| nothing, or what an ended process left | claims it, samples, stores its own result there, and then commits |
| nothing, while another process computes it | samples too: a run does not wait for it |

A result is stored there before the step's own commit: a step that is killed between the two finds it. Where an engine
is batch-invariant, the step commits the same rows and metrics either way, because a result's key contains all else that
they depend on. Elsewhere a result is as good as what the engine would sample now. The value `found` of a commit records
that its samples came from `evals/`.

Nothing is shared that a key does not determine: samples that go through user code or come from rounded weights, and
servers that the run does not start or that are of several kinds. A result with failed samples is not shared either,
because they may succeed another time.

A commit of the step has rows of its own and does not point to the shared result: in the last two cases, and where
nothing is shared, there is no result with its rows; and a redaction of the run must reach them.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.configs.schema.evaluation import BenchmarkConfig, EngineOptions
from cairn.configs.schema.run import RunConfig
from cairn.engines.agents.episodes.user_code import SINGLE_TURN
from cairn.engines.models.tokenizers import tokenizer_digest
from cairn.engines.processes.fingerprint import combined
from cairn.engines.rollout.plan import rounds_weights
from cairn.engines.types.types import FinishReason
from cairn.storage.evals import Claim, Evaluation, EvaluationKey, read_samples, try_claim
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.schemas import EVAL, GRADED_EVAL, IMAGES, SEQUENCES, complete
from cairn.storage.records import Environment
from cairn.storage.store.errors import Damaged, LeaseHeld, LeaseLost
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.step import Outcome, StepCall, changes, durable
from cairn.tasks.durable.versions import version_of
from cairn.tasks.evaluation.benchmarks import SCORE, measure
from cairn.tasks.evaluation.compute import SAMPLES, commit_result, evaluated_samples, generation, grade
from cairn.tasks.evaluation.questions import Questions, own_questions
from cairn.tasks.generation.calls import call_tables
from cairn.tasks.generation.episodes import Calls
from cairn.tasks.generation.generation import Engine, generate_function, generate_samples
from cairn.tasks.generation.groups import images_column, without_unused
from cairn.tasks.grading.reward import count_regraded
from cairn.tasks.grading.shaping import sampled_tokens
from cairn.tasks.rewards.grader import GRADER_OPTIONS, Graded
from cairn.tasks.trainer.sync import serve


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
    result exists. Samples are durable as they finish: after a failure only the missing ones are generated, and all are
    graded."""
    run, version, started_at = step.run, version_of(weights), time.time()
    benchmark = next(b for b in run.config.eval.benchmarks if b.name == name)
    grader = run.graders[name]
    # The random draws are equal at every evaluation, so differences come from the weights.
    questions = own_questions(run.config, benchmark, run.benchmarks[name], graded_by=f"{grader.name} {grader.version}")
    key = _key(run, weights, questions)
    values, call_files, graded = {"benchmark": name}, dict[str, pa.Table](), list[Graded]()
    with ExitStack() as claims:
        shared, rows = (None, None) if key is None else _shared_result(step, key, questions, claims)
        if isinstance(shared, Evaluation) and rows is not None:
            values["found"] = shared.key.folder
        if rows is None:
            samples, call_files = _generate(step, weights, questions)
            rows, graded = grade(grader, questions, run.tokenizer, samples)
            if key is not None and not rows["reward"].null_count:
                if isinstance(shared, LeaseHeld):  # its holder may have ended
                    shared = _look_up(step, key, claims)
                if isinstance(shared, Claim):
                    _share(step, weights, shared, questions, rows, started_at)
    table = rows.append_column("weight_version", pa.array([version] * rows.num_rows, pa.int64()))
    stored = pa.schema([*EVAL, *SEQUENCES])
    table = table.select(stored.names).cast(stored)
    if any(row.images for row in questions.rows):
        prompts = [questions.rows[index] for index in rows["prompt_index"].to_pylist()]
        table = table.append_column(IMAGES, images_column(prompts))
    return Outcome(
        tables={SAMPLES: without_unused(table), **call_files},
        values=values,
        metrics={**_metrics(benchmark, questions, rows), f"{name}-graded_again": count_regraded(graded)},
        timings={"grader_wait": max((g.waited for g in graded), default=0.0)},
        weight_version_in=version,
        weight_version_out=version,
        environment=engines_environment(run),
    )


def _metrics(benchmark: BenchmarkConfig, questions: Questions, rows: pa.Table) -> dict[str, float]:
    name = benchmark.name
    measured = measure(benchmark.metric, evaluated_samples(questions, rows))
    rewards = rows["reward"].drop_null().to_pylist()
    metrics = {name: measured.pop(SCORE), f"{name}-failed_samples": rows["reward"].null_count}
    metrics |= {f"eval/{name}/metric/{own_metric}": value for own_metric, value in measured.items()}
    if rewards:
        metrics[f"{name}-graded"] = float(np.mean(rewards))
    tokens = pc.list_value_length(rows["response_ids"]).to_pylist()
    responses = list(zip(tokens, rows["segments"].to_pylist(), rows["finish_reason"].to_pylist(), strict=True))
    generated = [one for one in responses if one[2] != FinishReason.ERROR]  # no response, no length
    if generated:
        lengths = np.asarray([sampled_tokens(length, segments) for length, segments, _ in generated])
        truncated = [reason == FinishReason.LENGTH for *_, reason in generated]
        metrics[f"{name}-truncated_ratio"] = float(np.mean(truncated))
        metrics[f"eval/{name}/response_len/mean"] = float(lengths.mean())
        metrics[f"eval/{name}/response_len/max"] = int(lengths.max())
    return metrics


def _generate(step: StepCall, weights: Commit | None, questions: Questions) -> tuple[pa.Table, dict[str, pa.Table]]:
    """Return all samples, and the tables of their recorded calls by file name. The prompts are dealt out over the
    rollout engines. Samples that an earlier attempt finished are not generated again."""
    engines = step.run.fleet.membership.serving()
    records, scope = generate_function(step.run).records, f"eval/{step.iteration}/{step.shard}"
    with (
        generation(step.attempt, step.input_digest, questions, step.earlier_digests) as generated,
        Calls(step, records=records, scope=scope) as calls,  # read after the samples that they belong to
    ):
        prompts = list(dict.fromkeys(request.group_id for request in generated.missing))

        def on_engine(engine: Engine, prompts: Sequence[int]) -> None:
            rows = {prompt: prompt for prompt in prompts}
            requests = [request for request in generated.missing if request.group_id in rows]
            if not requests:
                return
            serve(step.run, engine, weights, beside=engines[: len(prompts)])
            wanted = calls.with_logged_calls(requests)
            for samples in generate_samples(step, engine, weights, wanted, questions.sampling, rows=rows, calls=calls):
                calls.after(partial(generated.log.append, *samples))

        with ThreadPoolExecutor(len(engines)) as pool:
            shares = [prompts[index :: len(engines)] for index in range(len(engines))]
            list(pool.map(on_engine, engines, shares))
        made = calls.table()
        samples = generated.samples()
    return samples, {} if made is None else call_tables(made, samples.slice(0, 0))


# Results that are shared with other evaluations.


def _shared_result(
    step: StepCall, key: EvaluationKey, questions: Questions, claims: ExitStack
) -> tuple[Evaluation | Claim | LeaseHeld | None, pa.Table | None]:
    """Return the result of `_look_up`, None where it is damaged, and the rows of a result that may be reused."""
    try:
        shared = _look_up(step, key, claims)
        return shared, _reusable_rows(step, shared, questions) if isinstance(shared, Evaluation) else None
    except Damaged as error:
        message = f"{questions.name}: {error}; it is skipped, see `cairn verify --evals`"
        step.run.emit(Message(message, "warning"))
        return None, None


def _look_up(step: StepCall, key: EvaluationKey, claims: ExitStack) -> Evaluation | Claim | LeaseHeld:
    """Look a result up. A claim is released at the end of `claims`."""
    shared = try_claim(step.attempt.store, key)
    return claims.enter_context(shared) if isinstance(shared, Claim) else shared


def _reusable_rows(step: StepCall, result: Evaluation, questions: Questions) -> pa.Table | None:
    """Return the rows of a result with the schema GRADED_EVAL; None where it must not be taken."""
    run = step.run
    if result.metrics.get("failed") != 0 or any(changes(result.environment, engines_environment(run))):
        return None
    rows = read_samples(step.attempt.store, result)
    requested = [(one.group_id, one.index, one.seed) for one in questions.requests()]
    answered = zip(*(rows[name].to_pylist() for name in ("prompt_index", "sample_index", "seed")), strict=True)
    if requested != list(answered) or rows["log_probs"].null_count:  # it was taken over from a run that kept none
        return None
    origin = result.origin
    whose = f"run {origin['run']}" if "run" in origin else f"{origin.get('model', 'a model')}"
    run.emit(Message(f"{questions.name}: found in {result.key.folder}, evaluated for {whose}; nothing is sampled"))
    return complete(rows, GRADED_EVAL)


def _share(
    step: StepCall, weights: Commit | None, claim: Claim, questions: Questions, rows: pa.Table, started_at: float
) -> None:
    """Store the rows as the claimed result."""
    run = step.run
    origin: dict[str, Any] = {"run": run.ledger.run, "iteration": None, "weight_version": version_of(weights)}
    if weights is not None:
        synced = run.committed(weights.iteration, Step.SYNC)
        origin |= {"iteration": weights.iteration, "publication": f"{synced.run}/{synced.name}@{synced.digest}"}
    attempt = claim.attempt()
    with suppress(LeaseLost):  # suspended meanwhile: another process makes the result
        commit_result(
            claim,
            attempt,
            questions,
            rows,
            origin=origin,
            timings={"run": time.time() - started_at},
            started_at=started_at,
            environment=engines_environment(run),
            adopted=f"{run.ledger.run}/{step.name}",
        )


def engines_environment(run: RunContext) -> Environment:
    """Return the combined environment of all rollout engines of a run."""
    return combined([run.fleet.generating_environment(engine) for engine in run.fleet.membership.serving()])


def _key(run: RunContext, weights: Commit | None, questions: Questions) -> EvaluationKey | None:
    """Return the key of the result; None where a key would not determine it."""
    rollout = run.config.rollout
    if rollout.custom_generate_function_path != SINGLE_TURN or rollout.server_groups or rollout.external_urls:
        return None
    if rounds_weights(run.config):
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


@cache
def _checksum(folder: str, dtype: Literal["float32", "bfloat16"]) -> str:
    """Return the checksum of the model that a run begins with. It is read once in a driver, which has compared the
    model with the run's digest."""
    from cairn.engines.weights.checksum import folder_checksum  # PyTorch takes seconds to import

    return folder_checksum(folder, dtype)
