"""`eval`: one benchmark on one weight version."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from configs.schema.evaluation import BenchmarkConfig
from configs.schema.run import RunConfig
from engines.types import Completion, FinishReason, GenerateRequest, SamplingParams
from storage.commits import Commit, Step
from storage.schemas import EVAL, Status
from tasks.generation import generate_groups
from tasks.groups import completion_status, sample_seed
from tasks.recovery import version_of
from tasks.reward import grade_generated
from tasks.step import Outcome, StepCall, durable
from tasks.sync import bring_up_to_date


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
        "reward.rm_type",
        "reward.custom_rm_path",
        "reward.rm_timeout",
        "rollout.engine",
        "rollout.sglang",
        "rollout.server_groups",
        "rollout.dtype",
        "rollout.num_threads",
        "rollout.rollout_stop_token_ids",
    ),
    externals=("model", "eval"),
    plugins=("reward.custom_rm_path",),
)
def evaluate(step: StepCall, weights: Commit | None, *, name: str) -> Outcome:
    """Sample and grade every prompt of the benchmark `name` with the weights that `weights` left."""
    run, version = step.run, version_of(weights)
    benchmark = next(b for b in run.config.eval.benchmarks if b.name == name)
    data = run.benchmark_data(name)
    rows = [data.row(index) for index in range(len(data))]
    n = benchmark.n_samples_per_eval_prompt
    # The draws are the same at every evaluation: differences are then those of the weights.
    requests = [
        GenerateRequest(
            row.index,
            row.prompt_ids,
            tuple(sample_seed(run.config.seed, 0, row.index, index) for index in range(n)),
            SamplingParams(
                max_new_tokens=benchmark.max_response_len,
                temperature=benchmark.temperature,
                top_p=benchmark.top_p,
                top_k=benchmark.top_k,
                stop_token_ids=run.config.rollout.rollout_stop_token_ids,
            ),
        )
        for row in rows
    ]
    bring_up_to_date(run, weights)
    completions = sorted(_generate(step, weights, requests), key=lambda c: (c.request_id, c.sample_index))
    texts = run.tokenizer.batch_decode([c.response_ids.tolist() for c in completions], skip_special_tokens=True)
    asked = [rows[c.request_id] for c in completions]
    graded = grade_generated(
        run.benchmark_grader(name),
        [(text, row.label, row.metadata or {}) for text, row in zip(texts, asked, strict=True)],
        [completion.error for completion in completions],
    )
    failed = [g.reward is None for g in graded]
    rewards = np.asarray([g.reward for g in graded if g.reward is not None], np.float64)
    lengths = np.asarray([len(c.response_ids) for c in completions])
    truncated = [c.finish_reason == FinishReason.LENGTH for c in completions]
    table = pa.table(
        {
            "benchmark": [name] * len(graded),
            "prompt_index": [row.index for row in asked],
            "sample_index": [c.sample_index for c in completions],
            "prompt_text": [row.prompt_text for row in asked],
            "response_text": texts,
            "response_ids": [c.response_ids for c in completions],
            "reward": [g.reward for g in graded],
            "label": [row.label for row in asked],
            "finish_reason": [str(c.finish_reason) for c in completions],
            "status": [
                str(Status.FAILED if bad else completion_status(completion))
                for bad, completion in zip(failed, completions, strict=True)
            ],
            "error": [g.error for g in graded],
            "seed": [requests[c.request_id].seeds[c.sample_index] for c in completions],
            "weight_version": [version] * len(completions),
        },
        EVAL,
    )
    return Outcome(
        tables={"samples.parquet": table},
        values={"benchmark": name},
        metrics={
            **({name: float(rewards.mean())} if len(rewards) else {}),
            f"{name}-truncated_ratio": float(np.mean(truncated)),
            f"{name}-failed_samples": sum(failed),
            f"eval/{name}/response_len/mean": float(lengths.mean()),
            f"eval/{name}/response_len/max": int(lengths.max()),
        },
        weight_version_in=version,
        weight_version_out=version,
    )


def _generate(step: StepCall, weights: Commit | None, requests: Sequence[GenerateRequest]) -> list[Completion]:
    """All completions, the requests dealt out over the rollout engines."""
    engines = step.run.fleet.rollout

    def on_engine(index: int) -> list[Completion]:
        groups = generate_groups(step, engines[index], weights, requests[index :: len(engines)])
        return [completion for group in groups for completion in group]

    with ThreadPoolExecutor(len(engines)) as pool:
        return [c for part in pool.map(on_engine, range(len(engines))) for c in part]
