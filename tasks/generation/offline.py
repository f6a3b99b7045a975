"""Steps `rollout` and `filter` of a run whose data contain the responses to learn: the drawn rows are the batch.

Nothing is sampled or graded. So an iteration has one round of one shard, and between these steps and `train` only the
steps that its loss needs. The tables have the usual form: a row of the data is a group, its tokens count as sampled
from the weights that are trained, and their log-probs are 0, because no policy sampled them.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.engines.types.types import FinishReason
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.schemas import DATA, FILTER, ROLLOUT, Disposition, Status
from cairn.tasks.data.demonstrations import DemonstrationData, DemonstrationRow
from cairn.tasks.data.stream import draw
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.selection import number
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.durable.versions import weight_version_after


@durable(
    Step.ROLLOUT,
    reads=("seed", "data", "rollout.rollout_batch_size", "algorithm.loss_type", "algorithm.advantage_estimator"),
    externals=("data", "model"),
)
def read_demonstrations(
    step: StepCall, earlier: Sequence[Commit], *, cursor: int, without: Sequence[int] | None = None
) -> Outcome:
    """Read the `rollout_batch_size` rows that follow `cursor` in the data set and are not among `without`. `earlier` is
    the filter step that left the cursor."""
    run, config = step.run, step.run.config
    assert isinstance(run.data, DemonstrationData)
    drawn = draw(
        run.data,
        cursor,
        config.rollout.rollout_batch_size,
        seed=config.seed,
        shuffle=config.data.rollout_shuffle,
        max_prompt_len=None,
        without=frozenset(without or ()),
    )
    if drawn.refusal is not None and run.notice("demonstrations are passed over"):
        run.emit(
            Message(
                f"{drawn.passed_over} of the {drawn.passed_over + len(drawn.rows)} rows read in iteration "
                f"{step.iteration} were passed over (rollout/passed_over_prompts counts them); the last one: "
                f"{drawn.refusal}",
                "warning",
            )
        )
    version = weight_version_after(run.ledger, step.iteration - 1)
    table = _table(run, drawn.rows, version)
    return Outcome(
        tables={"samples.parquet": table},
        values={"cursor": drawn.cursor, "batch_invariant": True},
        metrics={
            "samples": table.num_rows,
            "generated_groups": 0,
            "recovered_groups": 0,
            "passed_over_prompts": drawn.passed_over,
            "cut_rows": sum(one.truncated for one in drawn.rows),
        },
        weight_version_in=version,
        weight_version_out=version,
    )


@durable(Step.FILTER)
def take_all(step: StepCall, rollout: Commit) -> Outcome:
    """Make a batch of all rows that were read, in their order."""
    run = step.run
    ids = run.read(rollout, ["group_id"]).column("group_id").unique()
    count = len(ids)
    lengths = [sum(mask) for mask in run.read(rollout, ["loss_mask"]).column("loss_mask").to_pylist()]
    columns: dict[str, Any] = {
        "group_id": ids,
        "iteration": [step.iteration] * count,
        "shard": [rollout.shard] * count,
        "kept": [True] * count,
        "disposition": [str(Disposition.TRAIN)] * count,
        "age": [0] * count,
    }
    nothing = {name: [None] * count for name in FILTER.names if name not in columns}
    arrays = {name: pa.array((columns | nothing)[name], FILTER.field(name).type) for name in FILTER.names}
    return Outcome(
        tables={"groups.parquet": pa.table(arrays, FILTER)},
        values={
            "full": True,
            "missing": 0,
            "cursor": number(rollout, "cursor"),
            "round": 0,
            "buffered": 0,
            "unfinished": 0,
            "max_age": None,
        },
        metrics={
            "groups": count,
            "response_len/mean": float(np.mean(lengths)),
            "response_len/median": float(np.median(lengths)),
            "response_len/max": max(lengths),
            "response_len/min": min(lengths),
        },
    )


def _table(run: RunContext, drawn: Sequence[DemonstrationRow], version: int) -> pa.Table:
    pairs = [(one, index, sample) for one in drawn for index, sample in enumerate(one.samples)]
    prompts = [sample.prompt_ids for _, _, sample in pairs]
    responses = [sample.response_ids for _, _, sample in pairs]
    metadata = {
        one.group_id: None if one.metadata is None else json.dumps(one.metadata, sort_keys=True) for one in drawn
    }
    count = len(pairs)
    columns = {
        "group_id": [one.group_id for one, _, _ in pairs],
        "sample_index": [index for _, index, _ in pairs],
        "rollout_id": [one.group_id * len(one.samples) + index for one, index, _ in pairs],
        "prompt_index": [one.index for one, _, _ in pairs],
        "epoch": [one.epoch for one, _, _ in pairs],
        "prompt_text": run.tokenizer.batch_decode(prompts, skip_special_tokens=False),
        "prompt_ids": prompts,
        "response_text": run.tokenizer.batch_decode(responses, skip_special_tokens=True),
        "response_ids": responses,
        "segments": [None] * count,
        "log_probs": [np.zeros(len(ids), np.float32) for ids in responses],
        "loss_mask": [sample.loss_mask for _, _, sample in pairs],
        "weight_versions": [np.full(len(ids), version, np.int32) for ids in responses],
        "finish_reason": [str(FinishReason.LENGTH if one.truncated else FinishReason.STOP) for one, _, _ in pairs],
        "status": [str(Status.TRUNCATED if one.truncated else Status.COMPLETED) for one, _, _ in pairs],
        "error": [None] * count,
        "seed": [0] * count,
        "engine": [DATA] * count,
        "seconds": [0.0] * count,
        "cached_tokens": [0] * count,
        "label": [None] * count,
        "metadata": [metadata[one.group_id] for one, _, _ in pairs],
    }
    return pa.table({name: pa.array(columns[name], ROLLOUT.field(name).type) for name in ROLLOUT.names}, ROLLOUT)
