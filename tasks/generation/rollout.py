"""Step `rollout`: generate the samples of one shard. It is the only step whose result depends on an engine's batching.

With `rollout.partial_rollout` a shard ends when its share of the needed groups is generated. The others are committed
as far as they came, their samples with status ABORTED, and a later shard continues them. Which samples had finished by
then depends on timing. So such a commit does not claim that its groups are reproducible, unless they are cut by tokens
(`in_rounds`).
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING

from pydantic import JsonValue

from cairn.configs.schema.run import RunConfig
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.types.keeping import KeeperRefused, Kept, KeptHere, SampleEnd, WantedSample
from cairn.engines.types.trajectories import Recorded
from cairn.engines.types.types import FinishReason, SamplingParams
from cairn.storage.ledger.commits import Commit, Step
from cairn.tasks.data.prompts import PromptRow
from cairn.tasks.data.stream import Draw
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.selection import GroupPlace, unfinished_groups
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.durable.versions import version_of
from cairn.tasks.generation.episodes import Calls
from cairn.tasks.generation.generation import Ask, generate_function, generate_samples
from cairn.tasks.generation.groups import Group, RowFormat, fresh_group
from cairn.tasks.generation.progress import ShardProgress
from cairn.tasks.generation.shard import SIGNING_KEY, Shard, ShardPlan, digest_of_tokenizer, open_shard
from cairn.tasks.trainer.sync import serve

if TYPE_CHECKING:
    from cairn.engines.fleet.rollout import RolloutHandle

# Partial rollout in rounds of tokens: the cut depends neither on time nor on a total of tokens.


Generate = Callable[[Sequence[WantedSample]], Iterator[list[SampleEnd]]]
"""Function that yields the end of each sample once; cut samples end as aborted."""


def in_rounds(
    generate: Generate, samples: Sequence[WantedSample], *, cut_tokens: int, enough: int, ended: Mapping[int, int]
) -> Iterator[list[SampleEnd]]:
    """Generate samples in rounds until `enough` groups have ended. Yield the end of each sample, and those of the open
    ones last.

        a round      every open sample gets at most `rollout.cut_tokens` more response tokens, after its whole prefix
        after it     the groups whose samples have all ended are counted, except those with a failed sample
        enough       open samples stay as they are: parts that a later shard continues
        else         the next round

    The number of tokens of a sample determines the round in which it ended. So an attempt that finds samples which an
    earlier one logged counts them after the rounds in which they ended there, generates the others in their original
    rounds, and stops after the same round.

    Args:
        ended: for groups with samples that ended before, the round in which the last of these ended. Groups with a
            failed sample are neither in it nor in `samples`. Groups with a sample that fails here are given up.
    """
    left = {sample.key: sample for sample in samples}
    last = dict(ended)
    for done in count():
        open_groups = {group_id for group_id, _ in left}
        if sum(ended_in <= done and id not in open_groups for id, ended_in in last.items()) >= enough or not left:
            break
        failed = set[int]()
        for ends in generate([replace(one, cut_at=one.begun + (done + 1) * cut_tokens) for one in left.values()]):
            for end in ends:
                if end.finish_reason != FinishReason.ABORT:
                    del left[end.key]
                    last[end.group_id] = max(done + 1, last.get(end.group_id, 0))
                if end.error is not None:
                    failed.add(end.group_id)
            yield [end for end in ends if end.finish_reason != FinishReason.ABORT]
        left = {key: one for key, one in left.items() if key[0] not in failed}
        last = {id: ended_in for id, ended_in in last.items() if id not in failed}
    yield list(map(SampleEnd.aborted, left.values()))


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
    entered = time.perf_counter()
    run, cut_tokens = step.run, step.run.config.rollout.cut_tokens
    draw = run.draw(cursor, count, without or (), earlier)
    places = resumed_groups(run, earlier, resumed=resumed, part=part, parts=parts)
    by_place = {(commit.iteration, commit.shard): commit for commit in continued}
    engine = run.fleet.rollout[part % len(run.fleet.rollout)]
    serve(run, engine, weights, beside=run.fleet.rollout[:parts])
    plan = _plan(
        step,
        engine.name,
        version_of(weights),
        [fresh_group(run, step.iteration, row) for row in shard_rows(draw, part, parts, resumed=resumed)],
        [(by_place[iteration, shard], group_id) for iteration, shard, group_id in places],
    )
    with (
        _keep(step, engine, plan) as shard,  # recovers samples before calls are read
        Calls(step, records=generate_function(run).records) as calls,
    ):
        left = shard.call(Shard.left)
        usable = sum(not requests for requests in left.missing.values())
        progress = ShardProgress(step, {id: len(wanted) for id, wanted in left.missing.items()})
        began = time.perf_counter()
        params = sampling_params(run.config, with_support=run.records_support)
        ask = _asking(engine, shard, calls)

        def generate(wanted: Sequence[WantedSample], enough: int | None = None) -> Iterator[list[SampleEnd]]:
            return generate_samples(
                step, engine, weights, wanted, params, rows=left.prompts, calls=calls, ask=ask, enough=enough
            )

        wanted = list(chain.from_iterable(left.missing.values()))
        if needed is None or cut_tokens is not None:  # else they are aborted when the shortest have finished
            wanted = run.response_lengths.longest_first(wanted, left.prompts)
        share = None if needed is None else _size(needed, part, parts)
        if share is None or cut_tokens is None:
            stream = generate(wanted, None if share is None else share - usable)
        else:
            stream = in_rounds(generate, wanted, cut_tokens=cut_tokens, enough=share, ended=left.ended)
        for ends in stream:
            if failed := {end.key: end.error for end in ends if end.error is not None and not end.kept}:
                shard.call(Shard.fail, failed)
            progress.take(ends)
        seconds = time.perf_counter() - began
        made = None
        if isinstance(shard, KeptHere):
            made = calls.table([record for group in shard.keeper.groups.values() for record in group.recorded])
        kept = shard.call(Shard.finish, made)
    ran = time.perf_counter() - entered - kept.seconds
    step.attempt.superseded[:] = kept.superseded
    run.response_lengths.add(kept.lengths)
    recovered_groups = len(left.failed) + usable
    return Outcome(
        files=kept.files,
        values={
            "cursor": draw.cursor,
            "batch_invariant": engine.batch_invariant and (needed is None or cut_tokens is not None),
        },
        metrics={
            "generated_groups": len(left.prompts) - recovered_groups - kept.metrics["aborted_groups"],
            "recovered_groups": recovered_groups,
            "continued_groups": len(places),
            "passed_over_prompts": draw.passed_over if part == 0 else 0,
            **kept.metrics,
            **{f"{engine.name.replace(':', '_')}/{name}": value for name, value in engine.usage().items()},
        },
        timings={"run": ran, "generate": seconds, "write": kept.seconds},
        weight_version_in=plan.version,
        weight_version_out=plan.version,
        environment=run.fleet.generating_environment(engine),
    )


def _plan(
    step: StepCall,
    engine: str,
    version: int,
    fresh: Sequence[Group],
    continued: Sequence[tuple[Commit, int]],
) -> ShardPlan:
    run, attempt = step.run, step.attempt
    return ShardPlan(
        run=attempt.run,
        iteration=attempt.iteration,
        step=attempt.step,
        shard=attempt.shard,
        attempt=attempt.name,
        input_digest=step.input_digest,
        earlier_digests=step.earlier_digests,
        model=os.path.abspath(run.config.model.path),
        tokenizer=digest_of_tokenizer(run.tokenizer),
        engine=engine,
        version=version,
        format=RowFormat.of(run),
        function=run.config.rollout.custom_generate_function_path,
        cut_tokens=run.config.rollout.cut_tokens,
        fresh=fresh,
        continued=continued,
    )


def _keep(step: StepCall, engine: "RolloutHandle", plan: ShardPlan) -> Kept[Shard]:
    """Return the keeper of a shard: in the engine's process, or in this one; see `cairn.tasks.generation.shard`."""
    run, store = step.run, step.attempt.store
    if store is run.ledger.store and not generate_function(run).records:
        try:
            return engine.keep(partial(open_shard, plan, store.url, signs=SIGNING_KEY in os.environ))
        except KeeperRefused as refused:
            if run.notice(f"{engine.name} keeps no samples"):
                message = f"{engine.name} cannot store its samples itself, so they go through the driver: {refused}"
                run.emit(Message(message, "warning"))
    return KeptHere(Shard(plan, step.attempt, run, run.tokenizer))


def _asking(engine: "RolloutHandle", shard: Kept[Shard], calls: Calls) -> Ask:
    """Return the function that has the engine generate samples for the keeper of a shard."""
    if not isinstance(shard, KeptHere):
        return lambda wanted, params, function: engine.generate_samples(wanted, params, function, shard)

    def ask(
        wanted: Sequence[WantedSample], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[SampleEnd] | Recorded]:
        requests = calls.with_logged_calls(shard.keeper.requests(wanted))
        for message in engine.generate_samples(requests, params, function):
            yield message if isinstance(message, Recorded) else shard.keeper.take(message, calls.after)

    return ask


def resumed_groups(
    run: RunContext, earlier: Sequence[Commit], *, resumed: int, part: int, parts: int
) -> Sequence[GroupPlace]:
    """Return the places of the unfinished groups that part `part` of `parts` continues. The first `resumed` groups are
    dealt out evenly to all parts."""
    return unfinished_groups(run, earlier[-1])[:resumed][part::parts] if resumed else []


def shard_rows(draw: Draw[PromptRow], part: int, parts: int, *, resumed: int = 0) -> Sequence[PromptRow]:
    """Return the consecutive rows of a draw that go to part `part` of `parts`. Together with the `resumed` groups dealt
    out, the parts' sizes differ by at most one."""
    sizes = [_size(resumed + len(draw.rows), p, parts) - _size(resumed, p, parts) for p in range(parts)]
    start = sum(sizes[:part])
    return draw.rows[start : start + sizes[part]]


def _size(count: int, part: int, parts: int) -> int:
    """Return the size of part `part` if `count` things are split into `parts`, the first ones larger by one."""
    return count // parts + (part < count % parts)


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
