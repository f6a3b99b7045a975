"""`filter`: decide which groups are trained on, and whether the batch needs another round of rollout.

A round sees all groups of the iteration so far, those left over from the iteration before first. A group with a failed
sample is dropped; the dynamic-sampling filter judges the rest; the first `rollout_batch_size` kept ones make the batch
and the surplus waits in the buffer for the next iteration. A group that was aborted unfinished is judged by nobody: it
waits for a later round of rollout, of this iteration or the next, that continues it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from storage.commits import Commit, Step
from storage.schemas import FILTER, Disposition, Status
from tasks.context import RunContext
from tasks.filters import FilterDecision, get_filter
from tasks.step import Outcome, StepCall, durable


class BatchNotFilled(Exception):
    """Every allowed round is done and the filter has kept too few groups; more of the same will not help."""


@dataclass(frozen=True)
class Group:
    """One group and what was decided about it. `iteration` and `shard` say where its samples lie."""

    group_id: int
    iteration: int
    shard: str
    mean_reward: float | None
    std_reward: float | None
    reason: str | None
    kept: bool
    spare: bool = False
    """Not kept, but better than an unfilled batch."""
    unfinished: bool = False
    """Aborted, to be continued."""
    disposition: Disposition = Disposition.DROP


GroupPlace = tuple[int, str, int]
"""(iteration, shard, group_id): where the samples of a group lie."""


@durable(
    Step.FILTER,
    reads=("rollout.rollout_batch_size", "rollout.max_refill_rounds", "rollout.dynamic_sampling_filter"),
    plugins=("rollout.dynamic_sampling_filter",),
)
def filter_groups(
    step: StepCall, previous: Commit | None, rollouts: Sequence[Commit], rewards: Sequence[Commit], *, round: int
) -> Outcome:
    """Judge all groups so far. `previous` is the last filter step of the iteration before, None in the first.

    `rollouts` and `rewards` are this iteration's shards, in pairs. The commit's values tell the flow how to go on:
    `full`, `missing` (groups) and `cursor`. Raises BatchNotFilled after `max_refill_rounds`.
    """
    config = step.run.config.rollout
    newest = {group.group_id: group for group in _left_over(step.run, previous)}
    for generated, graded in zip(rollouts, rewards, strict=True):
        assert generated.shard is not None
        for group in _judged_groups(step.run, step.iteration, generated.shard, graded):
            newest.pop(group.group_id, None)  # one that was continued comes where it was finished
            newest[group.group_id] = group
    last_round = round + 1 >= config.max_refill_rounds
    groups = fill_batch(list(newest.values()), config.rollout_batch_size, use_spare=last_round)
    dispositions = Counter(group.disposition for group in groups)
    missing = config.rollout_batch_size - dispositions[Disposition.TRAIN]
    reasons = Counter(group.reason for group in groups if group.reason)
    if missing and last_round:
        raise BatchNotFilled(
            f"iteration {step.iteration}: after {round + 1} rounds only {dispositions[Disposition.TRAIN]} of "
            f"{config.rollout_batch_size} groups were kept ({dict(reasons)}); raise rollout.max_refill_rounds, use "
            "check_reward_nonzero_std_with_fallback, or choose prompts of another difficulty"
        )
    return Outcome(
        tables={"groups.parquet": _table(groups)},
        values={
            "full": missing == 0,
            "missing": missing,
            "cursor": _cursor(rollouts, previous),
            "round": round,
            "buffered": dispositions[Disposition.BUFFER],
            "unfinished": dispositions[Disposition.CONTINUE],
        },
        metrics={
            "groups": len(groups),
            "rounds": round + 1,
            "buffered": dispositions[Disposition.BUFFER],
            "unfinished": dispositions[Disposition.CONTINUE],
            **{f"dynamic_filter/drop_{reason}": count for reason, count in sorted(reasons.items())},
        },
    )


def fill_batch(groups: Sequence[Group], batch_size: int, *, use_spare: bool) -> list[Group]:
    """Give every group its disposition: the first kept ones train, the surplus is buffered, unfinished ones are to be
    continued, the rest dropped.

    With `use_spare`, groups that the filter would rather not keep fill what is still missing.
    """
    chosen = [i for i, group in enumerate(groups) if group.kept][:batch_size]
    if use_spare:
        chosen += [i for i, group in enumerate(groups) if group.spare][: batch_size - len(chosen)]
    train = set(chosen)

    def disposition(index: int, group: Group) -> Disposition:
        if index in train:
            return Disposition.TRAIN
        if group.unfinished:
            return Disposition.CONTINUE
        return Disposition.BUFFER if group.kept else Disposition.DROP

    return [replace(group, disposition=disposition(i, group)) for i, group in enumerate(groups)]


def _left_over(run: RunContext, previous: Commit | None) -> list[Group]:
    """The surplus that the iteration before left, and what is unfinished, oldest first."""
    if previous is None or not number(previous, "buffered") + number(previous, "unfinished"):
        return []
    return [
        Group(
            row["group_id"],
            row["iteration"],
            row["shard"],
            row["mean_reward"],
            row["std_reward"],
            None,
            kept=row["disposition"] == Disposition.BUFFER,
            unfinished=row["disposition"] == Disposition.CONTINUE,
        )
        for row in run.read(previous).to_pylist()
        if row["disposition"] in (Disposition.BUFFER, Disposition.CONTINUE)
    ]


def number(selection: Commit, name: str) -> int:
    """One of the whole numbers among a filter step's values: `missing`, `cursor`, `round`, `buffered`, `unfinished`."""
    value = selection.values[name]
    assert isinstance(value, int)
    return value


def trained_groups(run: RunContext, selection: Commit) -> list[GroupPlace]:
    """The groups to train on, in the order of the batch."""
    return _places(run, selection, Disposition.TRAIN)


def unfinished_groups(run: RunContext, selection: Commit) -> list[GroupPlace]:
    """The groups that wait to be continued, in the order in which they are."""
    return _places(run, selection, Disposition.CONTINUE) if number(selection, "unfinished") else []


def _places(run: RunContext, selection: Commit, disposition: Disposition) -> list[GroupPlace]:
    rows = run.read(selection).to_pylist()
    return [(row["iteration"], row["shard"], row["group_id"]) for row in rows if row["disposition"] == disposition]


def _judged_groups(run: RunContext, iteration: int, shard: str, graded: Commit) -> list[Group]:
    decide = get_filter(run.config.rollout.dynamic_sampling_filter)
    rewards: dict[int, list[float | None]] = {}
    unfinished = set()
    for row in run.read(graded, ["group_id", "reward", "status"]).to_pylist():
        rewards.setdefault(row["group_id"], []).append(row["reward"])
        if row["status"] == Status.ABORTED:
            unfinished.add(row["group_id"])
    groups = []
    for group_id, values in rewards.items():
        if group_id in unfinished:
            groups.append(Group(group_id, iteration, shard, None, None, None, kept=False, unfinished=True))
            continue
        if any(value is None for value in values):
            groups.append(Group(group_id, iteration, shard, None, None, "failed_sample", kept=False))
            continue
        group_rewards = np.asarray(values, np.float64)
        decision: FilterDecision = decide(group_rewards)
        groups.append(
            Group(
                group_id,
                iteration,
                shard,
                float(group_rewards.mean()),
                float(group_rewards.std()),
                None if decision.keep else decision.reason,
                kept=decision.keep,
                spare=not decision.keep and decision.keep_when_insufficient,
            )
        )
    return groups


def _cursor(rollouts: Sequence[Commit], previous: Commit | None) -> JsonValue:
    """Where the next draw begins. The shards of a round agree on it, and the last round stands last."""
    last = rollouts[-1] if rollouts else previous
    assert last is not None
    return last.values["cursor"]


def _table(groups: Sequence[Group]) -> pa.Table:
    return pa.table(
        {
            "group_id": [g.group_id for g in groups],
            "iteration": [g.iteration for g in groups],
            "shard": [g.shard for g in groups],
            "kept": [g.disposition in (Disposition.TRAIN, Disposition.BUFFER) for g in groups],
            "disposition": [str(g.disposition) for g in groups],
            "reason": [g.reason for g in groups],
            "mean_reward": [g.mean_reward for g in groups],
            "std_reward": [g.std_reward for g in groups],
        },
        FILTER,
    )
