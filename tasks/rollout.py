"""`rollout`: generate the samples of one shard. The only step whose result depends on an engine's batching.

With `rollout.partial_rollout` a shard ends when its share of the groups that are needed is generated: the others are
committed as far as they came, samples with status ABORTED, and a later shard continues them. What had finished then is
a matter of time, so such a commit does not say that its groups would come out the same again.
"""

import time
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from cairn.engines.types import SamplingParams
from cairn.storage.commits import Commit, Step
from cairn.storage.schemas import Status, rollout_schema
from cairn.storage.write_ahead import WriteAhead
from cairn.tasks.context import RunContext
from cairn.tasks.data import Draw, DrawnRow
from cairn.tasks.filter import GroupPlace, unfinished_groups
from cairn.tasks.generation import generate_groups
from cairn.tasks.groups import Group, fresh_group, group_table, unfinished_group
from cairn.tasks.step import Outcome, StepCall, durable
from cairn.tasks.sync import bring_up_to_date


@durable(
    Step.ROLLOUT,
    reads=(
        "seed",
        "data",
        "rollout.engine",
        "rollout.sglang",
        "rollout.server_groups",
        "rollout.external_urls",
        "rollout.num_gpus_per_engine",
        "rollout.dtype",
        "rollout.num_threads",
        "rollout.n_samples_per_prompt",
        "rollout.partial_rollout",
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
    step: StepCall,
    weights: Commit | None,
    earlier: Sequence[Commit],
    continued: Sequence[Commit],
    *,
    cursor: int,
    count: int,
    resumed: int,
    needed: int | None,
    part: int,
    parts: int,
) -> Outcome:
    """Generate part `part` of `parts` of a round: the first `resumed` groups that wait unfinished, and the `count`
    prompts that follow `cursor` in the data set.

    `weights` is the train step that made the weights, None for the initial ones; `earlier` are the filter steps that
    fixed the cursor and what waits, `continued` the rollout steps that this part's share of it comes from. `needed`:
    groups of the round after which the others are aborted; None generates all. Groups are durable as they finish: after
    a failure only the missing ones are generated.
    """
    run = step.run
    version = weights.weight_version_out if weights is not None else 0
    assert version is not None
    draw = run.draw(cursor, count)
    places = resumed_groups(run, earlier, resumed=resumed, part=part, parts=parts)
    groups = _continued(run, places, continued)
    groups += [fresh_group(run, step.iteration, row) for row in shard_rows(draw, part, parts, resumed=resumed)]
    engine = run.fleet.rollout[part % len(run.fleet.rollout)]
    bring_up_to_date(run, weights)

    schema = rollout_schema(cut=run.records_kept)
    write_ahead = WriteAhead(step.attempt, step.input_digest, schema=schema, earlier_digests=step.earlier_digests)
    with write_ahead as log:
        recovered = log.recover()
        finished = set(recovered.column("group_id").to_pylist())
        missing = {group.drawn.group_id: group for group in groups if group.drawn.group_id not in finished}
        tables = [recovered]
        began = time.perf_counter()
        enough = None if needed is None else _size(needed, part, parts) - _usable(recovered)
        requests = [request for group in missing.values() for request in group.requests(_sampling_params(run))]
        given = sum(group.input_tokens for group in groups if group.drawn.group_id in finished)
        aborted = 0
        rows = {id: group.drawn.row.index for id, group in missing.items()}
        for completions in generate_groups(step, engine, weights, requests, rows=rows, enough=enough):
            group = missing[completions[0].request_id[0]]
            table = group_table(run, engine.name, group, group.whole(completions))
            tables.append(table)
            given += group.given_tokens(completions)
            if is_unfinished(table):
                aborted += 1
            else:
                log.append(table)
        seconds = time.perf_counter() - began
        samples = pa.concat_tables(tables).sort_by([("group_id", "ascending"), ("sample_index", "ascending")])
    return Outcome(
        tables={"samples.parquet": samples.combine_chunks()},
        values={
            "cursor": draw.cursor,
            "batch_invariant": engine.batch_invariant and needed is None,
        },
        metrics={
            "samples": samples.num_rows,
            "generated_groups": len(missing) - aborted,
            "recovered_groups": len(finished),
            "continued_groups": len(places),
            "aborted_groups": aborted,
            "prompt_tokens": given,
            "cached_tokens": pc.sum(samples.column("cached_tokens")).as_py() or 0,
            "response_tokens": token_count(samples, "response_ids") - sum(group.carried_tokens for group in groups),
            "passed_over_prompts": draw.passed_over if part == 0 else 0,
            **{f"{engine.name.replace(':', '_')}/{name}": value for name, value in engine.usage().items()},
        },
        timings={"generate": seconds},
        weight_version_in=version,
        weight_version_out=version,
        environment=run.fleet.generating_environment(engine),
    )


def resumed_groups(
    run: RunContext, earlier: Sequence[Commit], *, resumed: int, part: int, parts: int
) -> Sequence[GroupPlace]:
    """Where the groups lie that part `part` of `parts` continues, of the first `resumed` that wait: dealt out, so that
    all parts have as many."""
    return unfinished_groups(run, earlier[-1])[:resumed][part::parts] if resumed else []


def is_unfinished(samples: pa.Table) -> bool:
    """Whether a sample is a part."""
    return pc.any(pc.equal(samples.column("status"), str(Status.ABORTED))).as_py() or False


def token_count(samples: pa.Table, column: str) -> int:
    """Tokens in a list column."""
    return sum(len(chunk.flatten()) for chunk in samples.column(column).chunks)


def shard_rows(draw: Draw, part: int, parts: int, *, resumed: int = 0) -> Sequence[DrawnRow]:
    """The rows of a draw that go to part `part` of `parts`, neighbours: as many that, with the `resumed` groups dealt
    out, the parts' sizes differ by at most one."""
    sizes = [_size(resumed + len(draw.rows), p, parts) - _size(resumed, p, parts) for p in range(parts)]
    start = sum(sizes[:part])
    return draw.rows[start : start + sizes[part]]


def _size(count: int, part: int, parts: int) -> int:
    """Of part `part`, where `count` things are cut into `parts`, the first ones larger by one."""
    return count // parts + (part < count % parts)


def _continued(run: RunContext, places: Sequence[GroupPlace], rollouts: Sequence[Commit]) -> list[Group]:
    tables = {(commit.iteration, commit.shard): run.read(commit) for commit in rollouts}
    return [
        unfinished_group(tables[iteration, shard].filter(pc.field("group_id") == group_id))
        for iteration, shard, group_id in places
    ]


def _usable(samples: pa.Table) -> int:
    """Groups without a failed sample."""
    rows = zip(samples.column("group_id").to_pylist(), samples.column("status").to_pylist(), strict=True)
    failed: dict[int, bool] = {}
    for group_id, status in rows:
        failed[group_id] = failed.get(group_id, False) or status == Status.FAILED
    return sum(not bad for bad in failed.values())


def _sampling_params(run: RunContext) -> SamplingParams:
    config = run.config.rollout
    return SamplingParams(
        max_new_tokens=config.rollout_max_response_len,
        temperature=config.rollout_temperature,
        top_p=config.rollout_top_p,
        top_k=config.rollout_top_k,
        stop_token_ids=config.rollout_stop_token_ids,
        return_kept=run.records_kept,
    )
