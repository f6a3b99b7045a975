"""`eval`: one benchmark on one weight version.

The benchmark's score is what its `metric` makes of all samples, failed ones among them; the mean reward of those that
were graded is told too.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from cairn.configs.schema.evaluation import BenchmarkConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.fingerprint import combined
from cairn.engines.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types import FinishReason, SamplingParams
from cairn.storage.commits import Commit, Step
from cairn.storage.schemas import EVAL, GENERATED_EVAL, TRAJECTORIES, Status
from cairn.storage.write_ahead import WriteAhead
from cairn.tasks.benchmarks import SCORE, EvaluatedSample, measure
from cairn.tasks.generation import generate_samples
from cairn.tasks.groups import finished_samples, segments_value, status_of, trajectories_column, without_unused
from cairn.tasks.reward import given_samples, grade_generated, graded_again
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


def eval_seed(run_seed: int, benchmark: str, prompt_index: int, sample_index: int) -> int:
    """64-bit seed of a benchmark's sample, another one than any training sample's or other benchmark's: it depends on
    the benchmark's name, and what it is made of begins as no training sample's does."""
    words = f"eval/{benchmark}/{run_seed}/{prompt_index}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


@durable(
    Step.EVAL,
    reads=(
        "seed",
        "eval.benchmarks",
        "reward.rm_type",
        "reward.custom_rm_path",
        "reward.rm_timeout",
        "reward.rm_memory",
        "rollout.rollout_stop_token_ids",
        "rollout.custom_generate_function_path",
    ),
    externals=("model", "eval"),
    engines=("rollout",),
)
def evaluate(step: StepCall, weights: Commit | None, *, name: str) -> Outcome:
    """Sample and grade every prompt of the benchmark `name` with the weights that `weights` left. Samples are durable
    as they finish: after a failure only the missing ones are generated, and all are graded."""
    run, version = step.run, version_of(weights)
    benchmark = next(b for b in run.config.eval.benchmarks if b.name == name)
    data = run.benchmark_data(name)
    rows = [data.row(index) for index in range(len(data))]
    n = benchmark.n_samples_per_eval_prompt
    # The draws are the same at every evaluation: differences are then those of the weights.
    requests = [
        SampleRequest(
            row.index,
            index,
            row.prompt_ids,
            eval_seed(run.config.seed, name, row.index, index),
            prompt=row.prompt_text,
            label=row.label,
            metadata=row.metadata or {},
        )
        for row in rows
        for index in range(n)
    ]
    params = SamplingParams(
        max_new_tokens=benchmark.max_response_len,
        temperature=benchmark.temperature,
        top_p=benchmark.top_p,
        top_k=benchmark.top_k,
        stop_token_ids=run.config.rollout.rollout_stop_token_ids,
    )
    samples = _generate(step, weights, requests, params).to_pylist()
    graded_ids = [last_trajectory(sample["response_ids"], sample[TRAJECTORIES.name]) for sample in samples]
    texts = run.tokenizer.batch_decode(graded_ids, skip_special_tokens=True)
    asked = [rows[sample["group_id"]] for sample in samples]
    statuses = [status_of(sample["finish_reason"]) for sample in samples]
    errors = [sample["error"] for sample in samples]
    graded = grade_generated(
        run.benchmark_grader(name),
        given_samples(
            run.benchmark_grader(name),
            run.tokenizer,
            {
                "response_text": texts,
                "label": [row.label for row in asked],
                "metadata": [row.metadata or {} for row in asked],
                "response_ids": [sample["response_ids"] for sample in samples],
                "prompt_text": [row.prompt_text for row in asked],
                "prompt_ids": [row.prompt_ids for row in asked],
                "finish_reason": [sample["finish_reason"] for sample in samples],
                "status": statuses,
                "segments": [sample["segments"] for sample in samples],
                TRAJECTORIES.name: [sample[TRAJECTORIES.name] for sample in samples],
            },
        ),
        errors,
    )
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
                len(ids),
                sample["finish_reason"] == FinishReason.LENGTH,
                row.label,
                row.metadata or {},
            )
            for sample, ids, text, row, g in zip(samples, graded_ids, texts, asked, graded, strict=True)
        ],
    )
    rewards = [g.reward for g in graded if g.reward is not None]
    generated = [sample for sample in samples if sample["error"] is None]  # no response, no length
    lengths = np.asarray([len(sample["response_ids"]) for sample in generated])
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
            "response_text": texts,
            "response_ids": [sample["response_ids"] for sample in samples],
            "segments": [sample["segments"] for sample in samples],
            "reward": [g.reward for g in graded],
            "label": [row.label for row in asked],
            "finish_reason": [sample["finish_reason"] for sample in samples],
            "status": [str(Status.FAILED if bad else status) for bad, status in zip(failed, statuses, strict=True)],
            "error": [g.error for g in graded],
            "seed": [requests[sample["group_id"] * n + sample["sample_index"]].seed for sample in samples],
            "weight_version": [version] * len(samples),
            TRAJECTORIES.name: [sample[TRAJECTORIES.name] for sample in samples],
        },
        EVAL.append(TRAJECTORIES),
    )
    return Outcome(
        tables={"samples.parquet": without_unused(table)},
        values={"benchmark": name},
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
        environment=combined([run.fleet.generating_environment(engine) for engine in run.fleet.rollout]),
    )


def _generate(
    step: StepCall, weights: Commit | None, requests: Sequence[SampleRequest], params: SamplingParams
) -> pa.Table:
    """All samples, the prompts dealt out over the rollout engines. What an earlier attempt finished is in the log, and
    is not generated again."""
    engines = step.run.fleet.rollout
    earlier = step.earlier_digests
    with WriteAhead(
        step.attempt, step.input_digest, schema=GENERATED_EVAL, encode=_table, earlier_digests=earlier
    ) as log:
        recovered = log.recover()
        finished, _ = finished_samples(recovered)
        missing = [request for request in requests if request.key not in finished]
        prompts = list(dict.fromkeys(request.group_id for request in missing))

        def on_engine(index: int) -> None:
            share = {prompt: prompt for prompt in prompts[index :: len(engines)]}
            asked = [request for request in missing if request.group_id in share]
            if asked:
                serve(step.run, engines[index], weights)
            for generated in generate_samples(step, engines[index], weights, asked, params, rows=share):
                log.append(*generated)

        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(on_engine, range(len(engines))))
        rows = pa.concat_tables([recovered, log.appended()])
    return rows.sort_by([("group_id", "ascending"), ("sample_index", "ascending")])


def _table(samples: Sequence[GeneratedSample]) -> pa.Table:
    """Without what is only known of tokens that are trained on."""
    return pa.table(
        {
            "group_id": [sample.group_id for sample in samples],
            "sample_index": [sample.index for sample in samples],
            "response_ids": [sample.trajectory.response_ids for sample in samples],
            "segments": [segments_value(sample) for sample in samples],
            "finish_reason": [str(sample.finish_reason) for sample in samples],
            "error": [sample.error for sample in samples],
            TRAJECTORIES.name: trajectories_column(samples),
        },
        GENERATED_EVAL,
    )
