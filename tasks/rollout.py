"""`rollout`: generate the samples of one shard. The only step whose result depends on an engine's batching."""

import hashlib
import json
import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from engines.types import Completion, FinishReason, GenerateRequest, SamplingParams
from storage.commits import Commit, Step
from storage.schemas import ROLLOUT, Status
from storage.snapshots import WriteAhead
from tasks.context import RunContext
from tasks.data import Draw, DrawnRow
from tasks.generation import generate_groups
from tasks.step import Outcome, StepCall, durable
from tasks.sync import bring_up_to_date


@durable(
    Step.ROLLOUT,
    reads=(
        "seed",
        "data",
        "rollout.engine",
        "rollout.sglang",
        "rollout.dtype",
        "rollout.num_threads",
        "rollout.n_samples_per_prompt",
        "rollout.rollout_max_prompt_len",
        "rollout.rollout_max_response_len",
        "rollout.rollout_temperature",
        "rollout.rollout_top_p",
        "rollout.rollout_top_k",
        "rollout.rollout_stop_token_ids",
    ),
    externals=("data", "model"),
)
def rollout(
    step: StepCall, weights: Commit | None, earlier: Sequence[Commit], *, cursor: int, count: int, part: int, parts: int
) -> Outcome:
    """Generate part `part` of `parts` of the `count` prompts that follow `cursor` in the data set.

    `weights` is the train step that made the weights, None for the initial ones; `earlier` are the filter steps that
    fixed the cursor. Groups are durable as they finish: after a failure only the missing ones are generated.
    """
    run = step.run
    version = weights.weight_version_out if weights is not None else 0
    assert version is not None
    draw = run.draw(cursor, count)
    rows = shard_rows(draw, part, parts)
    engine = run.fleet.rollout[part % len(run.fleet.rollout)]
    bring_up_to_date(run, weights)

    with WriteAhead(step.attempt, step.input_digest) as log:
        recovered = log.recover()
        finished = set(recovered.column("group_id").to_pylist())
        missing = [row for row in rows if row.group_id not in finished]
        tables = [recovered]
        began = time.perf_counter()
        by_group = {row.group_id: row for row in missing}
        for completions in generate_groups(step, engine, weights, _requests(run, step.iteration, missing)):
            group = _group_table(run, engine.name, by_group[completions[0].request_id], step.iteration, completions)
            tables.append(group)
            log.append(group)
        seconds = time.perf_counter() - began
        samples = pa.concat_tables(tables).sort_by([("group_id", "ascending"), ("sample_index", "ascending")])
    return Outcome(
        tables={"samples.parquet": samples.combine_chunks()},
        values={
            "cursor": draw.cursor,
            "batch_invariant": engine.batch_invariant,
        },
        metrics={
            "samples": samples.num_rows,
            "generated_groups": len(missing),
            "recovered_groups": len(finished),
            "prompt_tokens": token_count(samples, "prompt_ids"),
            "response_tokens": token_count(samples, "response_ids"),
            "passed_over_prompts": draw.passed_over if part == 0 else 0,
        },
        timings={"generate": seconds},
        weight_version_in=version,
        weight_version_out=version,
    )


def completion_status(completion: Completion) -> Status:
    """How a generated sample ended, before it is graded."""
    if completion.error is not None:
        return Status.FAILED
    return Status.TRUNCATED if completion.finish_reason == FinishReason.LENGTH else Status.COMPLETED


def token_count(samples: pa.Table, column: str) -> int:
    """Tokens in a list column."""
    return sum(len(chunk.flatten()) for chunk in samples.column(column).chunks)


def shard_rows(draw: Draw, part: int, parts: int) -> Sequence[DrawnRow]:
    """Part `part` of a draw cut into `parts` runs of neighbours whose sizes differ by at most one."""
    size, larger = divmod(len(draw.rows), parts)
    start = part * size + min(part, larger)
    return draw.rows[start : start + size + (part < larger)]


def sample_seed(run_seed: int, iteration: int, group_id: int, sample_index: int) -> int:
    """64-bit seed of one sample; every random draw of its generation comes from it."""
    words = f"{run_seed}/{iteration}/{group_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def _requests(run: RunContext, iteration: int, rows: Sequence[DrawnRow]) -> list[GenerateRequest]:
    config = run.config.rollout
    params = SamplingParams(
        max_new_tokens=config.rollout_max_response_len,
        temperature=config.rollout_temperature,
        top_p=config.rollout_top_p,
        top_k=config.rollout_top_k,
        stop_token_ids=config.rollout_stop_token_ids,
    )
    return [
        GenerateRequest(row.group_id, row.row.prompt_ids, _group_seeds(run, iteration, row.group_id), params)
        for row in rows
    ]


def _group_seeds(run: RunContext, iteration: int, group_id: int) -> tuple[int, ...]:
    samples = range(run.config.rollout.n_samples_per_prompt)
    return tuple(sample_seed(run.config.seed, iteration, group_id, index) for index in samples)


def _group_table(
    run: RunContext, engine_name: str, drawn: DrawnRow, iteration: int, completions: list[Completion]
) -> pa.Table:
    row, seeds = drawn.row, _group_seeds(run, iteration, drawn.group_id)
    texts = run.tokenizer.batch_decode([c.response_ids.tolist() for c in completions], skip_special_tokens=True)
    n = len(completions)
    lengths = [len(c.response_ids) for c in completions]
    columns = {
        "group_id": [drawn.group_id] * n,
        "sample_index": [c.sample_index for c in completions],
        "rollout_id": [drawn.group_id * run.config.rollout.n_samples_per_prompt + c.sample_index for c in completions],
        "prompt_index": [row.index] * n,
        "epoch": [drawn.epoch] * n,
        "prompt_text": [row.prompt_text] * n,
        "prompt_ids": [np.asarray(row.prompt_ids, np.int32)] * n,
        "response_text": texts,
        "response_ids": [c.response_ids for c in completions],
        "log_probs": [c.log_probs for c in completions],
        "loss_mask": [np.ones(length, np.uint8) for length in lengths],
        "weight_versions": [c.weight_versions for c in completions],
        "finish_reason": [str(c.finish_reason) for c in completions],
        "status": [str(completion_status(c)) for c in completions],
        "error": [c.error for c in completions],
        "seed": [seeds[c.sample_index] for c in completions],
        "engine": [engine_name] * n,
        "seconds": [c.seconds for c in completions],
        "label": [row.label] * n,
        "metadata": [None if row.metadata is None else json.dumps(row.metadata, sort_keys=True)] * n,
    }
    return pa.table({name: pa.array(columns[name], ROLLOUT.field(name).type) for name in ROLLOUT.names}, ROLLOUT)
