"""`eval`: one benchmark on one weight version.

The benchmark's score is what its `metric` makes of all samples, failed ones among them; the mean reward of those that
were graded is told too.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.configs.schema.evaluation import BenchmarkConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.trajectories import GeneratedSample
from cairn.engines.types import FinishReason
from cairn.storage.commits import Commit, Step
from cairn.storage.schemas import EVAL, GENERATED_EVAL, IMAGES, SEQUENCES, TRAJECTORIES, Status
from cairn.storage.write_ahead import WriteAhead
from cairn.tasks.benchmarks import SCORE, EvaluatedSample, measure
from cairn.tasks.calls import call_tables
from cairn.tasks.episodes import Calls
from cairn.tasks.evaluated_rows import Answers
from cairn.tasks.evaluation_sharing import engines_environment, sharing
from cairn.tasks.generation import generate_function, generate_samples
from cairn.tasks.groups import (
    finished_samples,
    images_column,
    segments_value,
    status_of,
    trajectory_columns,
    without_unused,
)
from cairn.tasks.questions import Questions, own_questions
from cairn.tasks.reward import given_samples, grade_benchmark, graded_again, messages_of
from cairn.tasks.rewards.grading import GRADER_OPTIONS, Grading
from cairn.tasks.rewards.overlong import sampled_tokens
from cairn.tasks.sequences import last_trajectory
from cairn.tasks.step import Outcome, StepCall, durable
from cairn.tasks.sync import serve
from cairn.tasks.versions import version_of


def initial_eval_due(config: RunConfig) -> bool:
    """Whether the first iteration begins with an evaluation of the initial weights."""
    return config.eval.eval_interval is not None and not config.eval.skip_eval_before_train


def eval_due(config: RunConfig, iteration: int) -> bool:
    """Whether the weights that the iteration leaves are evaluated."""
    interval = config.eval.eval_interval
    if interval is None:
        return False
    return (iteration + 1) % interval == 0 or iteration + 1 == config.rollout.num_rollout


def eval_shard(benchmark: BenchmarkConfig, version: int) -> str:
    """Name of the commit: the first iteration may evaluate the initial weights and those it leaves."""
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
    """Sample and grade every prompt of the benchmark `name` with the weights that `weights` left, unless somebody has
    (`cairn.tasks.evaluation_sharing`). Samples are durable as they finish: after a failure only the missing ones are
    generated, and all are graded."""
    run, version = step.run, version_of(weights)
    benchmark = next(b for b in run.config.eval.benchmarks if b.name == name)
    grader = run.benchmark_grader(name)
    # The draws are the same at every evaluation: differences are then those of the weights.
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
            EvaluatedSample(
                sample["group_id"],
                sample["sample_index"],
                g.reward,
                g.components,
                g.error,
                text,
                len(_graded_ids(sample)),
                sample["finish_reason"] == FinishReason.LENGTH,
                row.label,
                row.metadata or {},
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
    """Of a sample with several trajectories, the last one's."""
    return last_trajectory(sample["response_ids"], sample[TRAJECTORIES.name])


def _generate(step: StepCall, weights: Commit | None, questions: Questions) -> tuple[pa.Table, dict[str, pa.Table]]:
    """All samples, the prompts dealt out over the rollout engines, and what is recorded of them, by its files' names.
    What an earlier attempt finished is in the log, and is not generated again."""
    engines = step.run.fleet.membership.serving()
    earlier = step.earlier_digests
    requests, records = questions.requests(), generate_function(step.run).records
    scope = f"eval/{step.iteration}/{step.shard}"
    with (
        WriteAhead(
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
    """Without what is only known of tokens that are trained on."""
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
