"""Step `rollout` of a run that streams: a round takes complete groups.

Which groups these are depends on timing. This step's commit decides it, before anything is computed from them.
"""

import time
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from cairn.engines.types.trajectories import GeneratedSample
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.layout import CALLS_FILE
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import GroupsGenerated
from cairn.tasks.durable.lengths import mean_lengths
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.generation.calls import call_table
from cairn.tasks.generation.groups import Group, RowFormat, sample_table
from cairn.tasks.generation.progress import INTERVAL, episode_metrics, failure_metrics
from cairn.tasks.generation.rollout import READS
from cairn.tasks.generation.shard import retold_metrics, shard_files, token_count
from cairn.tasks.streaming.stream import Stream


@durable(
    Step.ROLLOUT,
    reads=(*READS, "rollout.pipeline", "rollout.lag", "rollout.max_age"),
    externals=("data", "model", "search"),
    engines=("rollout",),
    finds=(Step.ADMIT,),
)
def take_groups(step: StepCall, earlier: Sequence[Commit], *, count: int) -> Outcome:
    """Take `count` groups from the stream when so many are complete. `earlier`: the filter step before."""
    run = step.run
    stream = run.attached(Stream)
    assert stream is not None

    reported_at = float("-inf")

    def report(complete: int) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= INTERVAL:
            reported_at = time.monotonic()
            run.emit(GroupsGenerated(step.iteration, step.shard, min(complete, count), count))

    taken = stream.take(step.iteration, count, report)
    serving = run.fleet.membership.serving()
    groups = {one.group.prompt.group_id: one.group for one in taken.groups}
    names = [engine.name for engine in run.fleet.rollout]
    rows = [(names[one.engine_of(part)], one.group, part) for one in taken.groups for part in one.group.finished()]

    def encode(samples: list[GeneratedSample]) -> pa.Table:
        return encode_rows(run, [("", groups[sample.group_id], sample) for sample in samples])

    ended = encode_rows(run, rows)
    samples, files = shard_files(ended, groups, encode, None if taken.calls is None else call_table(taken.calls))
    run.response_lengths.add(mean_lengths(samples))
    versions = [one.versions for one in taken.groups if one.versions is not None]
    newest = {id: one.versions[1] for id, one in zip(groups, taken.groups, strict=True) if one.versions is not None}
    admissions = {one.admission.name: one.admission for one in taken.groups}
    return Outcome(
        tables=files,
        selected=list({**admissions, taken.newest.name: taken.newest}.values()),
        values={
            "cursor": taken.newest.values["cursor"],
            "groups": list(groups),
            "newest": list(newest.values()),
            "sampled": list(newest),
            "open": taken.open,
            "admitted": taken.newest.name,
            "batch_invariant": False,
        },
        metrics={
            "samples": samples.num_rows,
            "generated_groups": sum(not one.recovered for one in taken.groups),
            "recovered_groups": sum(one.recovered for one in taken.groups),
            "engines": len(serving),
            "open_groups": sum(map(len, taken.open.values())),
            "prompt_tokens": token_count(samples, "prompt_ids"),
            "response_tokens": token_count(samples, "response_ids"),
            "cached_tokens": pc.sum(samples.column("cached_tokens")).as_py() or 0,
            "interrupted_samples": taken.usage.interrupted_samples,
            "recomputed_tokens": taken.usage.recomputed_tokens,
            **retold_metrics(run.config.rollout.custom_generate_function_path, samples),
            **episode_metrics(samples, files.get(CALLS_FILE)),
            **failure_metrics(ended),
        },
        timings={"wait": taken.waited, "engines": taken.usage.seconds, "update_stall": taken.usage.stall},
        weight_version_in=min((oldest for oldest, _ in versions), default=None),
        weight_version_out=max((newest for _, newest in versions), default=None),
        environment=run.fleet.generating_environment(serving[0]),
    )


def taken_ids(taken: Commit) -> list[int]:
    """Return the ids of the groups that such a step took."""
    groups = taken.values["groups"]
    assert isinstance(groups, list)
    return groups  # type: ignore[return-value]


def encode_rows(run: RunContext, rows: Sequence[tuple[str, Group, GeneratedSample]]) -> pa.Table:
    """Return rows of the rollout table for tuples (engine, group, sample)."""
    engines, groups, samples = zip(*rows, strict=True) if rows else ((), (), ())
    by_id = {group.prompt.group_id: group for group in groups}
    return sample_table(RowFormat.of(run), run.tokenizer, engines, by_id, samples)
