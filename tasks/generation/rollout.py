"""Step `rollout`: generate the samples of one shard. It is the only step whose result depends on an engine's batching.

With `rollout.partial_rollout` a shard ends when its share of the needed groups is generated. The others are committed
as far as they came, their samples with status ABORTED, and a later shard continues them. Which samples had finished by
then depends on timing. So such a commit does not claim that its groups are reproducible, unless they are cut by tokens
(`in_rounds`).
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, count, repeat

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.trajectories import GeneratedSample, SampleKey, SampleRequest
from cairn.engines.types.types import FinishReason, SamplingParams
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.layout import CALLS_FILE, IMAGES_FILE
from cairn.storage.ledger.schemas import RETOKENIZED, TRAJECTORIES, TRAJECTORY_PROMPTS, Status
from cairn.storage.logs.sample_log import SampleLog
from cairn.tasks.batch.batch import with_optional
from cairn.tasks.data.prompts import PromptRow
from cairn.tasks.data.stream import Draw
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.selection import GroupPlace, unfinished_groups
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.durable.versions import version_of
from cairn.tasks.generation.calls import call_tables, uncertain_effects
from cairn.tasks.generation.episodes import Calls
from cairn.tasks.generation.generation import generate_function, generate_samples
from cairn.tasks.generation.groups import (
    Group,
    finished_samples,
    fresh_group,
    image_table,
    sample_schema,
    sample_table,
    unfinished_group,
    without_unused,
)
from cairn.tasks.generation.progress import ShardProgress, episode_metrics, failure_metrics
from cairn.tasks.trainer.sync import serve

# Partial rollout in rounds of tokens: the cut depends neither on time nor on a total of tokens.


Generate = Callable[[Sequence[SampleRequest]], Iterator[list[GeneratedSample]]]
"""Function that yields each sample once; cut samples are yielded as parts."""


def in_rounds(
    generate: Generate, samples: Sequence[SampleRequest], *, cut_tokens: int, enough: int, ended: Mapping[int, int]
) -> Iterator[list[GeneratedSample]]:
    """Generate samples in rounds until `enough` groups have ended. Yield each sample as it ends, and the open ones
    last.

        a round      every open sample gets at most `rollout.cut_tokens` more response tokens, after its whole prefix
        after it     the groups whose samples have all ended are counted, except those with a failed sample
        enough       open samples are returned as they are: parts that a later shard continues
        else         the next round

    The number of tokens of a sample determines the round in which it ended. So an attempt that finds samples which an
    earlier one logged counts them after the rounds in which they ended there, generates the others in their original
    rounds, and stops after the same round.

    Args:
        ended: for groups with samples that ended before, the round in which the last of these ended (`rounds_of`).
            Groups with a failed sample are neither in it nor in `samples`. Groups with a sample that fails here are
            given up.
    """
    left = {sample.key: sample for sample in samples}
    begun = {key: 0 if sample.begun is None else len(sample.begun) for key, sample in left.items()}
    last = dict(ended)
    for done in count():
        open_groups = {group_id for group_id, _ in left}
        if sum(ended_in <= done and id not in open_groups for id, ended_in in last.items()) >= enough or not left:
            break
        requests = [replace(one, cut_at=begun[key] + (done + 1) * cut_tokens) for key, one in left.items()]
        failed = set[int]()
        for generated in generate(requests):
            for sample in generated:
                if sample.finish_reason == FinishReason.ABORT:
                    left[sample.key] = replace(left[sample.key], begun=sample.trajectory.segments[0])
                else:
                    del left[sample.key]
                    last[sample.group_id] = max(done + 1, last.get(sample.group_id, 0))
                if sample.error is not None:
                    failed.add(sample.group_id)
            yield [sample for sample in generated if sample.finish_reason != FinishReason.ABORT]
        left = {key: one for key, one in left.items() if key[0] not in failed}
        last = {id: ended_in for id, ended_in in last.items() if id not in failed}
    yield [GeneratedSample.aborted(sample) for sample in left.values()]


def rounds_of(new_tokens: int, cut_tokens: int | None) -> int:
    """Return the number of rounds in which a sample got `new_tokens`; 1 where nothing is cut."""
    return max(1, math.ceil(new_tokens / cut_tokens)) if cut_tokens is not None else 1


def ended_rounds(samples: pa.Table, groups: Mapping[int, Group], cut_tokens: int) -> dict[int, int]:
    """Return by group the round in which the last of its ended samples ended. `samples`: their rows of the rollout
    table."""
    lengths = pc.list_value_length(samples.column("response_ids")).to_pylist()
    keys = zip(samples.column("group_id").to_pylist(), samples.column("sample_index").to_pylist(), strict=True)
    ended: dict[int, int] = {}
    for (group_id, index), length in zip(keys, lengths, strict=True):
        rounds = rounds_of(length - groups[group_id].carried_tokens(index), cut_tokens)
        ended[group_id] = max(rounds, ended.get(group_id, 0))
    return ended


READS = (
    "seed",
    "data",
    "rollout.n_samples_per_prompt",
    "rollout.partial_rollout",
    "rollout.cut_tokens",
    "rollout.rollout_max_prompt_len",
    "rollout.rollout_max_response_len",
    "rollout.rollout_temperature",
    "rollout.rollout_top_p",
    "rollout.rollout_top_k",
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
    "algorithm.use_rollout_routing_replay",
)
"""Configuration fields that samples depend on."""


@durable(
    Step.ROLLOUT,
    reads=READS,
    externals=("data", "model", "search"),
    engines=("rollout",),
)
def rollout(
    step: StepCall,
    weights: Commit | None,
    earlier: Sequence[Commit],
    continued: Sequence[Commit],
    *,
    cursor: JsonValue,
    count: int,
    resumed: int,
    needed: int | None,
    part: int,
    parts: int,
    without: Sequence[int] | None = None,
) -> Outcome:
    """Generate part `part` of `parts` of a round: the first `resumed` unfinished groups, and the `count` prompts that
    follow `cursor` in the data set and are not among `without`.

    Samples are durable as they finish: after a failure only the missing ones are generated.

    Args:
        weights: the train step that made the weights; None for the initial ones.
        earlier: the filter steps that fixed the cursor and the unfinished groups.
        continued: the rollout steps that this part's share of the unfinished groups comes from.
        needed: number of groups of the round after which the others are aborted; None generates all.
        without: rows of the data; None leaves it out of the inputs.
    """
    run, cut_tokens = step.run, step.run.config.rollout.cut_tokens
    version = version_of(weights)
    draw = run.draw(cursor, count, without or (), earlier)
    places = resumed_groups(run, earlier, resumed=resumed, part=part, parts=parts)
    groups = _continued(run, places, continued)
    groups += [fresh_group(run, step.iteration, row) for row in shard_rows(draw, part, parts, resumed=resumed)]
    engine = run.fleet.rollout[part % len(run.fleet.rollout)]
    serve(run, engine, weights, beside=run.fleet.rollout[:parts])

    by_id = {group.prompt.group_id: group for group in groups}
    encode = partial(sample_table, run, engine.name, by_id)
    schema = sample_schema(run, by_id)
    earlier_inputs = step.earlier_digests
    records = generate_function(run).records
    with (
        SampleLog(step.attempt, step.input_digest, schema=schema, encode=encode, earlier_digests=earlier_inputs) as log,
        nullcontext(log.recover()) as recovered,  # before calls are read
        Calls(step, records=records) as calls,
    ):
        finished, errors = finished_samples(recovered)
        missing = {id: group.requests(finished=finished) for id, group in by_id.items() if id not in errors}
        usable = sum(not requests for requests in missing.values())
        progress = ShardProgress(step, {id: len(requests) for id, requests in missing.items()})
        began = time.perf_counter()
        aborted = []
        rows = {id: group.prompt.index for id, group in by_id.items()}
        generate = partial(
            generate_samples,
            step,
            engine,
            weights,
            params=sampling_params(run.config, with_support=run.records_support),
            rows=rows,
            calls=calls,
        )
        wanted = list(chain.from_iterable(missing.values()))
        if needed is None or cut_tokens is not None:  # else they are aborted when the shortest have finished
            wanted = run.response_lengths.longest_first(wanted, rows)
        share = None if needed is None else _size(needed, part, parts)
        if share is None or cut_tokens is None:
            stream = generate(wanted, enough=None if share is None else share - usable)
        else:
            ended = {id: r for id, r in ended_rounds(recovered, by_id, cut_tokens).items() if id not in errors}
            stream = in_rounds(generate, wanted, cut_tokens=cut_tokens, enough=share, ended=ended)
        for generated in stream:
            finished_now = [sample for sample in generated if sample.finish_reason != FinishReason.ABORT]
            calls.after(partial(log.append, *finished_now))  # raises where the calls cannot be logged
            aborted += [sample for sample in generated if sample.finish_reason == FinishReason.ABORT]
            progress.take(generated)
        seconds = time.perf_counter() - began
        made = calls.table([record for group in groups for record in group.recorded])
        carried = [sample for group in groups for sample in group.finished() if sample.key not in finished]
        tables = [recovered, log.appended(), *([encode(carried + aborted)] if carried or aborted else [])]
        ended = pa.concat_tables(tables)
        samples, files = shard_files(ended, by_id, encode, made)
    run.response_lengths.add(samples)
    recovered_groups = len(errors) + usable
    aborted_rows = samples.filter(pc.field("status") == str(Status.ABORTED))
    aborted_groups = len(aborted_rows.column("group_id").unique())
    return Outcome(
        tables=files,
        values={
            "cursor": draw.cursor,
            "batch_invariant": engine.batch_invariant and (needed is None or cut_tokens is not None),
        },
        metrics={
            "samples": samples.num_rows,
            "generated_groups": len(groups) - recovered_groups - aborted_groups,
            "recovered_groups": recovered_groups,
            "continued_groups": len(places),
            "aborted_groups": aborted_groups,
            "prompt_tokens": _input_tokens(samples, by_id, cut_tokens),
            "cached_tokens": pc.sum(samples.column("cached_tokens")).as_py() or 0,
            "response_tokens": token_count(samples, "response_ids") - sum(group.carried_tokens() for group in groups),
            "passed_over_prompts": draw.passed_over if part == 0 else 0,
            **retold_metrics(run.config, samples),
            **episode_metrics(samples, files.get(CALLS_FILE)),
            **failure_metrics(ended),
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
    """Return the places of the unfinished groups that part `part` of `parts` continues. The first `resumed` groups are
    dealt out evenly to all parts."""
    return unfinished_groups(run, earlier[-1])[:resumed][part::parts] if resumed else []


def shard_files(
    ended: pa.Table,
    groups: Mapping[int, Group],
    encode: Callable[[list[GeneratedSample]], pa.Table],
    calls: pa.Table | None,
) -> tuple[pa.Table, dict[str, pa.Table]]:
    """Return all samples of a shard's groups (`whole_groups`), and the tables of its commit by file name.

    Args:
        ended: rows of the rollout table, for samples that ended or were aborted.
        encode: encodes samples as such rows.
        calls: rows of CALLS; None where nothing is recorded.
    """
    uncertain = {} if calls is None else uncertain_effects(calls)
    samples = without_unused(whole_groups(ended, groups, encode, uncertain))
    files = {"samples.parquet": samples.combine_chunks()}
    images = image_table(groups.values())
    if images is not None:
        files[IMAGES_FILE] = images
    return samples, files if calls is None else {**files, **call_tables(calls, samples)}


def whole_groups(
    samples: pa.Table,
    groups: Mapping[int, Group],
    encode: Callable[[list[GeneratedSample]], pa.Table],
    uncertain: Mapping[SampleKey, str],
) -> pa.Table:
    """Return all samples in their order. If one sample of a group failed, all of them fail: each with its own error,
    with its error in `uncertain` since it is not run again, or with the group's first error."""
    _, errors = finished_samples(samples)
    if errors:
        columns = (samples.column(name).to_pylist() for name in ("group_id", "sample_index", "error"))
        own = {(id, index): error for id, index, error in zip(*columns, strict=True) if error is not None}
        failed = [sample for id, error in errors.items() for sample in groups[id].failed(error, {**uncertain, **own})]
        others = pc.invert(pc.is_in(samples.column("group_id"), pa.array(errors, pa.int64())))
        samples = pa.concat_tables([samples.filter(others), encode(failed)])
    return samples.sort_by([("group_id", "ascending"), ("sample_index", "ascending")])


def _input_tokens(samples: pa.Table, groups: Mapping[int, Group], cut_tokens: int | None) -> int:
    """Return the input tokens of all calls of the samples that got tokens in this shard, with one prefill per round."""
    names = ["group_id", "sample_index", "segments", TRAJECTORIES.name, TRAJECTORY_PROMPTS.name]
    columns = [column.to_pylist() for column in with_optional(samples, names).columns]
    lengths = [pc.list_value_length(samples.column(name)).to_pylist() for name in ("prompt_ids", "response_ids")]
    total = 0
    for group_id, index, segments, trajectories, own, prompt, response in zip(*columns, *lengths, strict=True):
        carried = groups[group_id].carried_tokens(index)
        if response > carried:
            starts = zip((0, *accumulate(trajectories or ())), own or repeat(None), strict=False)
            prompts = {at: prompt if ids is None else len(ids) for at, ids in starts}
            calls, start, end, before = dict[str, int](), 0, 0, prompts[0]
            for segment in segments or ():
                if end in prompts:
                    start, before = end, prompts[end]
                if segment["call"]:
                    calls.setdefault(segment["call"], before + end - start)
                end += segment["tokens"]
            total += carried + sum(calls.values() or [before])
            more_rounds = rounds_of(response - carried, cut_tokens) - 1
            total += more_rounds * (prompt + carried) + (cut_tokens or 0) * more_rounds * (more_rounds + 1) // 2
    return total


def retold_metrics(config: RunConfig, samples: pa.Table) -> dict[str, int]:
    """Return the number of tokens that the policy sampled, and how many of them a later prompt of user code encodes as
    other tokens."""
    if "." not in config.rollout.custom_generate_function_path:
        return {}
    segments, retold = with_optional(samples, ["segments", RETOKENIZED.name]).columns
    lengths = pc.list_value_length(samples.column("response_ids")).to_pylist()
    sampled = 0
    for length, parts in zip(lengths, segments.to_pylist(), strict=True):
        sampled += length if parts is None else sum(one["tokens"] for one in parts if one["call"] is not None)
    return {"sampled_tokens": sampled, "retold_tokens": pc.sum(retold).as_py() or 0}


def token_count(samples: pa.Table, column: str) -> int:
    """Return the number of tokens in a list column."""
    return sum(len(chunk.flatten()) for chunk in samples.column(column).chunks)


def shard_rows(draw: Draw[PromptRow], part: int, parts: int, *, resumed: int = 0) -> Sequence[PromptRow]:
    """Return the consecutive rows of a draw that go to part `part` of `parts`. Together with the `resumed` groups dealt
    out, the parts' sizes differ by at most one."""
    sizes = [_size(resumed + len(draw.rows), p, parts) - _size(resumed, p, parts) for p in range(parts)]
    start = sum(sizes[:part])
    return draw.rows[start : start + sizes[part]]


def _size(count: int, part: int, parts: int) -> int:
    """Return the size of part `part` if `count` things are split into `parts`, the first ones larger by one."""
    return count // parts + (part < count % parts)


def _continued(run: RunContext, places: Sequence[GroupPlace], rollouts: Sequence[Commit]) -> list[Group]:
    tables = {(commit.iteration, commit.shard): run.read(commit) for commit in rollouts}
    images = {(commit.iteration, commit.shard): run.images(commit) for commit in rollouts}
    calls = {(commit.iteration, commit.shard): run.calls(commit) for commit in rollouts}
    return [
        unfinished_group(
            tables[iteration, shard].filter(pc.field("group_id") == group_id),
            images[iteration, shard],
            calls[iteration, shard],
        )
        for iteration, shard, group_id in places
    ]


def sampling_params(run: RunConfig, *, with_support: bool) -> SamplingParams:
    """Return the sampling parameters of training samples. `with_support`: whether to return each token's sampling
    support."""
    config = run.rollout
    return SamplingParams(
        max_new_tokens=config.rollout_max_response_len,
        temperature=config.rollout_temperature,
        top_p=config.rollout_top_p,
        top_k=config.rollout_top_k,
        stop_token_ids=config.rollout_stop_token_ids,
        stop=config.rollout_stop,
        return_sampling_support=with_support,
        return_routed_experts=run.algorithm.use_rollout_routing_replay,
    )
