"""Step `rollout`: generate the samples of one shard. It is the only step whose result depends on an engine's batching.

With `rollout.partial_rollout` a shard ends when its share of the needed groups is generated. The others are committed
as far as they came, their samples with status ABORTED, and a later shard continues them. Which samples had finished by
then depends on timing. So such a commit does not claim that its groups are reproducible, unless they are cut by tokens
(`cairn.tasks.generation.rounds`).
"""

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from pydantic import JsonValue

from cairn.configs.schema.run import RunConfig
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.types.keeping import Finished, KeeperRefused, SampleEnd, WantedSample, closed_in_the_end
from cairn.engines.types.trajectories import Recorded
from cairn.engines.types.types import SamplingParams
from cairn.storage.ledger.commits import Commit, Step
from cairn.tasks.data.prompts import PromptRow
from cairn.tasks.data.stream import Draw
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.selection import GroupPlace, unfinished_groups
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.durable.versions import version_of
from cairn.tasks.generation.episodes import Calls
from cairn.tasks.generation.generation import (
    explaining_losses,
    generate_function,
    generate_samples,
    is_suspect,
    recording_failures,
)
from cairn.tasks.generation.groups import Group, RowFormat, fresh_group
from cairn.tasks.generation.progress import ShardProgress
from cairn.tasks.generation.shard import SIGNING_KEY, Left, Shard, ShardPlan, digest_of_tokenizer, open_shard
from cairn.tasks.trainer.sync import serve

if TYPE_CHECKING:
    from cairn.engines.fleet.rollout import RolloutHandle

CHECKED_WITHIN = 30.0
"""Seconds for which an engine is trusted to serve the weights of other shards of the round: the weights of each sample
are checked, and a call tells whether the engine is lost."""

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
    serve(run, engine, weights, beside=run.fleet.rollout[:parts], checked_within=CHECKED_WITHIN)
    fresh = [fresh_group(run, step.iteration, row) for row in shard_rows(draw, part, parts, resumed=resumed)]
    groups = [(by_place[iteration, shard], group_id) for iteration, shard, group_id in places]
    share = None if needed is None else _size(needed, part, parts)
    plan = _plan(step, engine.name, version_of(weights), fresh, groups, share)
    with closing(generate_shard(step, engine, weights, plan)) as messages:
        left = next(messages)
        assert isinstance(left, Left)
        progress = ShardProgress(step, {id: len(wanted) for id, wanted in left.missing.items()})
        began = ended = time.perf_counter()
        for message in messages:
            if isinstance(message, Finished):
                kept, usage = message.result, message.usage
            elif isinstance(message, list):
                progress.take(message)
                ended = time.perf_counter()
    ran = time.perf_counter() - entered - kept.seconds
    step.attempt.superseded[:] = kept.superseded
    run.response_lengths.add(kept.lengths)
    return Outcome(
        files=kept.files,
        values={
            "cursor": draw.cursor,
            "batch_invariant": engine.batch_invariant and (needed is None or cut_tokens is not None),
        },
        metrics={
            "generated_groups": len(left.prompts) - left.recovered - kept.metrics["aborted_groups"],
            "recovered_groups": left.recovered,
            "continued_groups": len(places),
            "passed_over_prompts": draw.passed_over if part == 0 else 0,
            **kept.metrics,
            **{f"{engine.name.replace(':', '_')}/{name}": value for name, value in usage.items()},
        },
        timings={"run": ran, "generate": ended - began, "write": kept.seconds},
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
    share: int | None,
) -> ShardPlan:
    run, attempt = step.run, step.attempt
    cut_tokens = run.config.rollout.cut_tokens
    lengths = None
    if share is None or cut_tokens is not None:  # else samples are aborted when the shortest have finished
        lengths = run.response_lengths.means({group.prompt.group_id: group.prompt.index for group in fresh})
    ids = [*(id for _, id in continued), *(group.prompt.group_id for group in fresh)]
    errors = {id: run.casualties.blamed(step.name, id) for id in ids}
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
        function=generate_function(run),
        params=sampling_params(run.config, with_support=run.records_support),
        cut_tokens=cut_tokens,
        share=share,
        lengths=lengths,
        backwards=run.casualties.times(step.name) % 2 == 1,
        blamed={id: error for id, error in errors.items() if error is not None},
        fresh=fresh,
        continued=continued,
    )


Messages = Generator[Left | list[SampleEnd] | Finished, None, None]
"""What is left to generate of a shard, then the ends of its samples, then its files."""


def generate_shard(step: StepCall, engine: "RolloutHandle", weights: Commit | None, plan: ShardPlan) -> Messages:
    """Generate a shard in the engine's process, or else in this one; see `cairn.tasks.generation.shard`."""
    run, store = step.run, step.attempt.store
    ids = [*(id for _, id in plan.continued), *(group.prompt.group_id for group in plan.fresh)]
    if store is run.ledger.store and not plan.function.records and not any(is_suspect(step, id) for id in ids):
        try:
            yield from _beside(step, engine, partial(open_shard, plan, store.url, signs=SIGNING_KEY in os.environ))
            return
        except KeeperRefused as refused:
            if run.notice(f"{engine.name} keeps no samples"):
                message = f"{engine.name} cannot store its samples itself, so they go through the driver: {refused}"
                run.emit(Message(message, "warning"))
    yield from _here(step, engine, weights, plan)


def _beside(step: StepCall, engine: "RolloutHandle", make: Callable[[], Shard]) -> Messages:
    """Generate a shard in the engine's process. An engine that is lost before the shard's turn counts against none of
    its groups."""
    rows = dict[int, int]()
    with explaining_losses(step, rows), closing(engine.keep(make)) as messages:
        left = next(messages)
        rows.update(left.prompts)
        unfinished = {one.key for wanted in left.missing.values() for one in wanted}
        yield left
        with recording_failures(step, lambda: {id for id, _ in unfinished}):
            for message in messages:
                if not isinstance(message, Finished):
                    unfinished.difference_update(end.key for end in message)
                yield message


def _here(step: StepCall, engine: "RolloutHandle", weights: Commit | None, plan: ShardPlan) -> Messages:
    """Generate a shard in the driver."""
    with (
        closed_in_the_end(Shard(plan, step.attempt, step.run, step.run.tokenizer)) as shard,  # reads samples before
        Calls(step, records=plan.function.records) as calls,  # reads calls
    ):
        left = shard.left()
        yield left

        def ask(
            wanted: Sequence[WantedSample], params: SamplingParams, function: GenerateFunction
        ) -> Iterator[list[SampleEnd] | Recorded]:
            requests = calls.with_logged_calls(shard.requests(wanted))
            for message in engine.generate_samples(requests, params, function):
                yield message if isinstance(message, Recorded) else shard.take(message, calls.after)

        def generate(wanted: Sequence[WantedSample], enough: int | None) -> Iterator[list[SampleEnd]]:
            return generate_samples(
                step, engine, weights, wanted, plan.params, rows=left.prompts, calls=calls, ask=ask, enough=enough
            )

        yield from shard.ends(generate)
        files = shard.finish(calls.table([one for group in shard.groups.values() for one in group.recorded]))
    yield Finished(files, engine.usage())


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
