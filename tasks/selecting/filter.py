"""The step `filter`: decide which groups are trained on, and whether the batch needs another round of rollout.

A round sees all groups of the iteration so far, and the remaining ones of the previous iteration. A group with a failed
sample is dropped. The dynamic-sampling filter decides about the others. `rollout_batch_size` of the kept groups make
the batch, in the order of the buffer policy (`cairn.tasks.selecting.buffers`). Nothing is decided about an unfinished
group, whose generation was aborted: it waits for a later round of rollout, of this iteration or the next, that resumes
it.

The age of a group is that of its newest tokens, in publications (`cairn.tasks.durable.versions`). `rollout.max_age`
bounds it:

| kept group for which the batch has no room | result |
|---|---|
| the next iteration may train on it | it waits in the buffer |
| it would be too old then | it is dropped: `surplus` |
| a fork or an upgrade has lowered the bound, and it is too old now | it is dropped: `too_old` |

So no waiting group is too old, and a round may rely on it. The bound is recorded with every group, since the batch
masks older tokens of a group that was resumed. Groups that were committed without a bound are used unchanged.

A streamed group may have older tokens next to younger ones, if it took longer than `rollout.timeout`.
`rollout.staleness_policy` (`cairn.tasks.selecting.staleness`) decides about them, once: their number and weights are
recorded, too."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from cairn.configs.errors import Failure
from cairn.configs.slime import values_read
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.schemas import (
    BUFFER_KEY,
    FILTER,
    PRIORITY,
    REMOVED,
    STALE_TOKENS,
    STALE_WEIGHTS,
    Disposition,
    Status,
)
from cairn.storage.store.canonical import from_json
from cairn.tasks.batch.batch import with_optional
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.selection import number
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.durable.versions import sampled_as_newest, sampled_from, token_ages
from cairn.tasks.grading.failures import COLUMNS, CommonError, common_error
from cairn.tasks.grading.graded import GradedSample
from cairn.tasks.grading.sample_metrics import generated_metrics
from cairn.tasks.grading.shaping import as_graded
from cairn.tasks.selecting.buffers import BufferPolicy, get_policy, in_order_of_slime
from cairn.tasks.selecting.buffers.group import JudgedGroup
from cairn.tasks.selecting.filters import get_filter, slime_sample, takes_samples
from cairn.tasks.selecting.filters.sample import ROLLOUT_COLUMNS, FilterDecision, graded_samples
from cairn.tasks.selecting.sample_filters import removed_by
from cairn.tasks.selecting.staleness import stale_weights

AGES = SURPLUS, TOO_OLD = "surplus", "too_old"
"""Reasons for dropping groups that the filter kept."""


NONZERO_STD = "check_reward_nonzero_std"
"""Filter that drops groups without a difference in reward."""
_FAILED = "failed_sample"
"""Reason for dropping a group with a failed sample."""


class BatchNotFilled(Failure):
    """All allowed rounds are done, and the filter has kept too few groups. Further rounds will not help."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what, advice)
        self.advice = advice

    def __str__(self) -> str:
        return "; ".join(self.args)


class NoSuchMetadata(Failure):
    """A data row lacks the value by which groups are to be ordered."""


@durable(
    Step.FILTER,
    reads=(
        "rollout.rollout_batch_size",
        "rollout.max_refill_rounds",
        "rollout.dynamic_sampling_filter",
        "rollout.buffer_filter_path",
        "rollout.buffer_key",
        "rollout.rollout_sample_filter_path",
        "rollout.max_age",
        "rollout.staleness_policy",
        "rollout.pipeline",
        "rollout.lag",
        "rollout.mask_offpolicy_in_partial_rollout",
    ),
    beside=True,
)
def filter_groups(
    step: StepCall, previous: Commit | None, rollouts: Sequence[Commit], rewards: Sequence[Commit], *, round: int
) -> Outcome:
    """Decide about all groups so far.

    The commit's values tell the flow how to continue: `full`, `missing` (groups) and `cursor`. Raises BatchNotFilled
    after `max_refill_rounds`, and earlier where every sample of several groups failed.

    Args:
        previous: the last filter step of the previous iteration; None in the first.
        rollouts: the rollout commits of this iteration's shards.
        rewards: the reward commits of the same shards, in the same order.
    """
    config = step.run.config.rollout
    newest = {group.group_id: group for group in _remaining_groups(step.run, previous, step.iteration)}
    for generated, graded in zip(rollouts, rewards, strict=True):
        assert generated.shard is not None
        sampled, stale = _sampled_from(step.run, generated), _stale_tokens(step.run, step.iteration, generated)
        for group in _judged_groups(step.run, step.iteration, generated, graded):
            newest.pop(group.group_id, None)  # one that was continued comes where it was finished
            group = _aged(step.run, step.iteration, group, sampled=sampled.get(group.group_id))
            newest[group.group_id] = _weighed(step.run, group, stale.get(group.group_id))
    last_round = round + 1 >= config.max_refill_rounds
    groups = fill_batch(
        list(newest.values()),
        config.rollout_batch_size,
        order=get_policy(config.buffer_filter_path, partial(_order_of_slime, step.run)),
        use_spare=last_round,
        max_age=config.oldest_trained,
    )
    dispositions = Counter(group.disposition for group in groups)
    missing = config.rollout_batch_size - dispositions[Disposition.TRAIN]
    reasons = Counter(g.reason for g in groups if g.reason and g.disposition == Disposition.DROP)
    failed = _common_error(step.run, rewards) if missing and reasons[_FAILED] else None
    if failed is not None and failed.will_recur and len(groups) > 1:
        raise BatchNotFilled(f"iteration {step.iteration}: {failed}", _correct(failed))
    if missing and last_round:
        what = (
            f"iteration {step.iteration}: after {round + 1} rounds only {dispositions[Disposition.TRAIN]} of "
            f"{config.rollout_batch_size} groups were kept ({dict(reasons)})"
        )
        if failed is not None and reasons.most_common(1)[0][0] == _FAILED:
            raise BatchNotFilled(f"{what}: {failed}", _correct(failed))
        raise BatchNotFilled(what, _keep_more(config.dynamic_sampling_filter))
    if not missing:
        groups = _without_removed(step.run, groups)
    removed = sum(len(group.removed) for group in groups)
    stale_tokens = sum(group.stale_tokens for group in groups)
    return Outcome(
        tables={"groups.parquet": _table(step.run, groups)},
        values={
            "full": missing == 0,
            "missing": missing,
            "cursor": _cursor(rollouts, previous),
            "round": round,
            "buffered": dispositions[Disposition.BUFFER],
            "unfinished": dispositions[Disposition.CONTINUE],
            "max_age": config.oldest_trained,
        },
        metrics={
            "groups": len(groups),
            "rounds": round + 1,
            "buffered": dispositions[Disposition.BUFFER],
            "unfinished": dispositions[Disposition.CONTINUE],
            **(generated_metrics(step.run, rollouts, rewards) if missing == 0 else {}),
            **({"sample_filter/removed": removed} if config.rollout_sample_filter_path is not None else {}),
            **({"age/stale_tokens": stale_tokens} if config.pipeline == "streaming" else {}),
            "age/dropped_groups": sum(reasons[reason] for reason in AGES),
            **{f"dynamic_filter/drop_{why}": count for why, count in sorted(reasons.items()) if why not in AGES},
        },
    )


def fill_batch(
    groups: Sequence[JudgedGroup], batch_size: int, *, order: BufferPolicy, use_spare: bool, max_age: int
) -> list[JudgedGroup]:
    """Return all groups with their dispositions.

    Groups to train on come first, in the order of `order`. The others keep their order, but the unfinished ones among
    them, which will be resumed, are in the order of `order`. Surplus of an age of at most `max_age` in the next
    iteration is buffered; the rest is dropped.

    Args:
        use_spare: fill missing places with groups that the filter would rather not keep.
    """
    usable = [group for group in groups if not group.is_too_old]
    ordered = order([group for group in groups if group.unfinished or (group.kept and not group.is_too_old)])
    train = [group for group in ordered if not group.unfinished][:batch_size]
    if use_spare:
        train += [group for group in usable if group.spare][: batch_size - len(train)]
    chosen = {group.group_id for group in train}
    waiting = iter([group for group in ordered if group.unfinished])

    def left(group: JudgedGroup) -> JudgedGroup:
        if group.unfinished:
            return replace(next(waiting), disposition=Disposition.CONTINUE)
        if group.kept and group.age + 1 <= max_age:
            return replace(group, disposition=Disposition.BUFFER)
        return replace(group, reason=(TOO_OLD if group.is_too_old else SURPLUS) if group.kept else group.reason)

    trained = [replace(group, disposition=Disposition.TRAIN) for group in train]
    return trained + [left(group) for group in groups if group.group_id not in chosen]


def buffered_groups(run: RunContext, previous: Commit, iteration: int) -> int:
    """Return how many groups an iteration may take from the buffer of the previous one."""
    return sum(group.kept and not group.is_too_old for group in _remaining_groups(run, previous, iteration))


def _remaining_groups(run: RunContext, previous: Commit | None, iteration: int) -> list[JudgedGroup]:
    """Return the surplus and the unfinished groups of the previous iteration, oldest first, with their ages in
    `iteration`."""
    if previous is None or not number(previous, "buffered") + number(previous, "unfinished"):
        return []
    return [
        _aged(
            run,
            iteration,
            JudgedGroup(
                row["group_id"],
                row["iteration"],
                row["shard"],
                row["mean_reward"],
                row["std_reward"],
                None,
                kept=row["disposition"] == Disposition.BUFFER,
                unfinished=row["disposition"] == Disposition.CONTINUE,
                priority=row.get(PRIORITY.name),
                key=from_json(row.get(BUFFER_KEY.name) or "null"),
            ),
        )
        for row in run.read(previous).to_pylist()
        if row["disposition"] in (Disposition.BUFFER, Disposition.CONTINUE)
    ]


def _sampled_from(run: RunContext, generated: Commit) -> dict[int, int]:
    """Return, for the groups that a rollout took from a stream, the iteration whose newest weights sampled their newest
    tokens. It is empty where the rollout generated the groups itself, all with the same weights."""
    ids, versions = generated.values.get("sampled", []), generated.values.get("newest", [])
    assert isinstance(ids, list)
    assert isinstance(versions, list)
    iterations = {version: sampled_from(run.ledger, version) for version in set(versions)}  # type: ignore[arg-type]
    return {id: iterations[version] for id, version in zip(ids, versions, strict=True)}  # type: ignore[misc]


def _aged(run: RunContext, iteration: int, group: JudgedGroup, *, sampled: int | None = None) -> JudgedGroup:
    """Return a group with its age in an iteration and the bound for its tokens. `sampled`: see `_sampled_from`."""
    config = run.config.rollout
    age = iteration - (sampled_as_newest(run.ledger, group.iteration) if sampled is None else sampled)
    max_age = min(config.oldest_trained, age) if config.mask_offpolicy_in_partial_rollout else config.oldest_trained
    return replace(group, age=age, max_age=max_age)


def _stale_tokens(run: RunContext, iteration: int, generated: Commit) -> dict[int, Counter[int]]:
    """Return the number of trainable tokens of each age, for the streamed groups with tokens that are too old in an
    iteration."""
    config, oldest = run.config.rollout, generated.weight_version_in
    if config.pipeline != "streaming" or oldest is None:
        return {}
    if iteration - sampled_from(run.ledger, oldest) <= config.oldest_trained:
        return {}
    by_group: dict[int, Counter[int]] = {}
    for row in run.read(generated, ["group_id", "weight_versions", "loss_mask"]).to_pylist():
        trained = np.asarray(row["weight_versions"], np.int64)[np.asarray(row["loss_mask"], bool)]
        ages = token_ages(run.ledger, iteration, trained).tolist()
        by_group.setdefault(row["group_id"], Counter()).update(ages)
    return {id: ages for id, ages in by_group.items() if max(ages, default=0) > config.oldest_trained}


def _weighed(run: RunContext, group: JudgedGroup, tokens: Counter[int] | None) -> JudgedGroup:
    """Return a group with the decision of `rollout.staleness_policy`, if some of its tokens are too old.

    `tokens`: number of tokens by age.
    """
    max_age = group.max_age
    if tokens is None or max_age is None:
        return group
    group = replace(group, stale_tokens=sum(count for age, count in tokens.items() if age > max_age))
    if not (group.kept or group.spare):
        return group
    weights = stale_weights(run.config.rollout.staleness_policy, tokens, max_age)
    if weights is None:
        return replace(group, kept=False, spare=False, reason=TOO_OLD)
    return replace(group, stale_weights=weights)


def _judged_groups(run: RunContext, iteration: int, generated: Commit, graded: Commit) -> list[JudgedGroup]:
    config, shard = run.config.rollout, generated.shard
    assert shard is not None
    decide = get_filter(config.dynamic_sampling_filter, run.config)
    whole = takes_samples(config.dynamic_sampling_filter)
    samples = _samples(run, generated, graded) if whole else {}
    keys = _keys(run, generated)
    rewards: dict[int, list[float | None]] = {}
    unfinished = set()
    table = run.read(graded)
    columns = (table.column("group_id"), as_graded(table), table.column("status"))
    for id, reward, status in zip(*(column.to_pylist() for column in columns), strict=True):
        rewards.setdefault(id, []).append(reward)
        if status == Status.ABORTED:
            unfinished.add(id)
    groups = []
    for group_id, values in rewards.items():
        group = JudgedGroup(group_id, iteration, shard, None, None, None, kept=False, key=keys.get(group_id))
        if group_id in unfinished:
            groups.append(replace(group, unfinished=True))
            continue
        if any(value is None for value in values):
            groups.append(replace(group, reason=_FAILED))
            continue
        group_rewards = np.asarray(values, np.float64)
        decision: FilterDecision = decide(samples[group_id] if whole else group_rewards)
        groups.append(
            replace(
                group,
                mean_reward=float(group_rewards.mean()),
                std_reward=float(group_rewards.std()),
                reason=None if decision.keep else decision.reason,
                kept=decision.keep,
                spare=not decision.keep and decision.keep_when_insufficient,
                priority=None if decision.priority is None else float(decision.priority),
            )
        )
    return groups


def _common_error(run: RunContext, rewards: Sequence[Commit]) -> CommonError | None:
    return common_error(run.read(graded, COLUMNS) for graded in rewards)


def _correct(failed: CommonError) -> str:
    what = failed.place or "the grader or the generate function"
    return f"correct {what}, and fork the run or start another: a run cannot change its code"


def _keep_more(name: str | None) -> str:
    """Return what to change where the filter `name` drops too many groups."""
    if name == NONZERO_STD:
        return (
            "all samples of those groups have the same reward: raise rollout.max_refill_rounds, use "
            f"{NONZERO_STD}_with_fallback, or choose prompts of another difficulty"
        )
    return "raise rollout.max_refill_rounds, or let rollout.dynamic_sampling_filter keep more groups"


def _samples(run: RunContext, generated: Commit, graded: Commit) -> dict[int, list[GradedSample]]:
    return graded_samples(with_optional(run.read(generated, ROLLOUT_COLUMNS), ROLLOUT_COLUMNS), run.read(graded))


def _graded(run: RunContext) -> Callable[[JudgedGroup], list[GradedSample]]:
    """Return a function that returns the samples of a group; none where one of them has no reward."""

    @cache
    def shard(iteration: int, name: str) -> dict[int, list[GradedSample]]:
        rollout, reward = (run.committed(iteration, step, name) for step in (Step.ROLLOUT, Step.REWARD))
        return _samples(run, rollout, reward)

    return lambda group: shard(group.iteration, group.shard).get(group.group_id, [])


def _order_of_slime(run: RunContext, function: Callable[..., Any]) -> BufferPolicy:
    args, samples = values_read(run.config, function), _graded(run)
    key = args["reward_key"]

    def samples_of(group: JudgedGroup) -> list[Any]:
        graded = samples(group)
        return [slime_sample(one, len(graded), key) for one in graded]

    return in_order_of_slime(function, args, run.config.rollout.rollout_batch_size, samples_of)


def _keys(run: RunContext, generated: Commit) -> dict[int, Any]:
    """Return the value of each group under `rollout.buffer_key` in its metadata; empty without that option.

    Raises NoSuchMetadata.
    """
    name = run.config.rollout.buffer_key
    if name is None:
        return {}
    keys = {}
    for row in run.read(generated, ["group_id", "prompt_index", "metadata"]).to_pylist():
        metadata = from_json(row["metadata"]) if row["metadata"] else {}
        if name not in metadata:
            raise NoSuchMetadata(
                f"rollout.buffer_key is {name}, but the metadata of data row {row['prompt_index']} has "
                f"{', '.join(sorted(metadata)) or 'nothing'}: name a key that all rows have, or add it to them"
            )
        keys[row["group_id"]] = metadata[name]
    return keys


def _without_removed(run: RunContext, groups: Sequence[JudgedGroup]) -> list[JudgedGroup]:
    """Return the groups of a full batch; trained ones name the samples that the sample filter removes."""
    name = run.config.rollout.rollout_sample_filter_path
    if name is None:
        return list(groups)
    trained = [group for group in groups if group.disposition == Disposition.TRAIN]
    samples = _graded(run)
    removed = removed_by(name, [samples(group) for group in trained], run.config)
    return [replace(group, removed=tuple(removed.get(group.group_id, ()))) for group in groups]


def _cursor(rollouts: Sequence[Commit], previous: Commit | None) -> JsonValue:
    """Return the cursor of the next draw. The shards of a round agree on it, and the last round comes last."""
    last = rollouts[-1] if rollouts else previous
    assert last is not None
    return last.values["cursor"]


def _table(run: RunContext, groups: Sequence[JudgedGroup]) -> pa.Table:
    table = pa.table(
        {
            "group_id": [g.group_id for g in groups],
            "iteration": [g.iteration for g in groups],
            "shard": [g.shard for g in groups],
            "kept": [g.kept or g.disposition == Disposition.TRAIN for g in groups],
            "disposition": [str(g.disposition) for g in groups],
            "reason": [g.reason for g in groups],
            "mean_reward": [g.mean_reward for g in groups],
            "std_reward": [g.std_reward for g in groups],
            "age": pa.array([None if g.unfinished else g.age for g in groups], FILTER.field("age").type),
            "max_age": pa.array([g.max_age for g in groups], FILTER.field("max_age").type),
        },
        FILTER,
    )
    further: list[tuple[pa.Field, list[Any]]] = []
    if any(group.priority is not None for group in groups):
        further.append((PRIORITY, [group.priority for group in groups]))
    if run.config.rollout.buffer_key is not None:
        further.append((BUFFER_KEY, [json.dumps(group.key) for group in groups]))
    if run.config.rollout.rollout_sample_filter_path is not None:
        trained = [group.disposition == Disposition.TRAIN for group in groups]
        removed = [list(group.removed) if chosen else None for group, chosen in zip(groups, trained, strict=True)]
        further.append((REMOVED, removed))
    if any(group.stale_tokens for group in groups):
        further.append((STALE_TOKENS, [group.stale_tokens or None for group in groups]))
    if any(any(group.stale_weights) for group in groups):
        further.append((STALE_WEIGHTS, [list(group.stale_weights) or None for group in groups]))
    for field, values in further:
        table = table.append_column(field, pa.array(values, field.type))
    return table
