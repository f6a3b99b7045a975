"""The step `advantage`: per-token advantages and returns of the kept samples, a pure function of rewards and scores."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from cairn.configs.kinds import ESTIMATOR
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig, KLType
from cairn.engines.training.batching import split_steps
from cairn.engines.training.losses.kl import kl_divergence
from cairn.engines.training.needs import advantage_needs, needs_components
from cairn.engines.types.types import FinishReason
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.schemas import (
    ADVANTAGE,
    RAW_REWARD,
    TRAJECTORIES,
    TRAJECTORY_REWARDS,
    TRAJECTORY_ROLES,
    TURN_REWARDS,
    Status,
)
from cairn.storage.store.canonical import from_json
from cairn.tasks.advantages.batch import Estimator, ScoredBatch, Turn, normalise
from cairn.tasks.advantages.dpo import preference_metrics
from cairn.tasks.batch.batch import age_weights, arrays, mean_of_trained, rows_of_groups, trained_tokens
from cairn.tasks.durable.recorded_run import RecordedRun
from cairn.tasks.durable.selection import max_ages, stale_weights
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.grading.sample_metrics import sample_metrics, sampled_lengths
from cairn.tasks.grading.shaping import as_graded, by_name
from cairn.tasks.selecting.sample_filters import NothingLeft

# On-policy distillation: the teacher scores every sampled token (Gu et al. 2024, "MiniLLM: Knowledge Distillation of
# Large Language Models", section 2.1; Agarwal et al. 2024, "On-Policy Distillation of Language Models").


def reverse_kl(log_probs: Sequence[np.ndarray], teacher_log_probs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return [T_i] float32 of each sample: the policy's log-prob of each token less the teacher's.

    This is a one-sample estimate of the reverse KL divergence of the policy from the teacher, in nats.
    """
    return [policy - teacher for policy, teacher in zip(log_probs, teacher_log_probs, strict=True)]


def distil(
    advantages: Sequence[np.ndarray], divergences: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray], coef: float
) -> list[np.ndarray]:
    """Return A_t - coef · (log π(y_t) - log π_teacher(y_t)) at trained tokens; advantages of other tokens are
    unchanged.

    All arguments are [T_i] of each sample; the result is float32.
    """
    return [
        (advantage - coef * divergence * mask.astype(bool)).astype(np.float32)
        for advantage, divergence, mask in zip(advantages, divergences, loss_masks, strict=True)
    ]


# Baselines where samples have several trajectories, or roles: see `compared`.


Segments = Sequence[dict[str, Any]]
"""Segments in a row of the rollout table."""


@dataclass(frozen=True)
class Episodes:
    """Trajectories, roles, segments and turns of N samples: each field has an entry a sample, as in the tables."""

    lengths: Sequence[Sequence[int] | None]
    """Tokens of each trajectory, where there are several."""
    rewards: Sequence[Sequence[float] | None]
    """Reward of each trajectory, where they have rewards of their own."""
    roles: Sequence[Sequence[str | None] | None]
    segments: Sequence[Segments | None]
    turn_rewards: Sequence[Sequence[float | None] | None]

    def role_rewards(self, rewards: Sequence[float]) -> dict[str, float]:
        """Return the mean reward of each role: the mean over its samples of the mean over a sample's trajectories in
        it.

        Args:
            rewards: reward of each sample, for trajectories without rewards of their own.
        """
        means_by_role = dict[str, list[float]]()
        for shared, own_rewards, roles in zip(rewards, self.rewards, self.roles, strict=True):
            own = np.array(own_rewards or [shared] * len(roles or ()), np.float64)
            for role in dict.fromkeys(roles or ()):
                if role is not None:
                    means_by_role.setdefault(role, []).append(float(own[[one == role for one in roles or ()]].mean()))
        return {role: float(np.mean(means)) for role, means in sorted(means_by_role.items())}

    def turns(self, totals: Sequence[int]) -> list[list[Turn]]:
        """Return the turns of each sample. `totals`: tokens of each sample."""
        return [_turns(*one) for one in zip(self.segments, self.turn_rewards, totals, strict=True)]


Span = tuple[int, int]
"""First token of a part of a response, and the index after its last one."""


@dataclass(frozen=True)
class _Unit:
    """A unit of comparison: a sample, or those of its trajectories that share a role and a reward."""

    sample: int
    spans: Sequence[Span]
    reward: float
    truncated: bool

    def of(self, values: np.ndarray) -> np.ndarray:
        """Select this unit's tokens from [T] of the sample's."""
        return np.concatenate([values[start:end] for start, end in self.spans])


@dataclass(frozen=True)
class Compared:
    """A batch in which each unit of comparison is a sample."""

    batch: ScoredBatch
    _units: Sequence[_Unit] | None
    """Unit of each sample; None where they are the samples of the original batch."""
    _lengths: Sequence[int]
    """Tokens of each sample of the original batch."""

    def of_samples(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Convert [T_i] of each sample of this batch to those of the original batch."""
        if self._units is None:
            return list(values)
        joined = [np.zeros(length, values[0].dtype) for length in self._lengths]
        for unit, own in zip(self._units, values, strict=True):
            ends = list(accumulate(end - start for start, end in unit.spans))
            for (start, end), part in zip(unit.spans, np.split(own, ends[:-1]), strict=True):
                joined[unit.sample][start:end] = part
        return joined


def compared(batch: ScoredBatch, episodes: Episodes) -> Compared:
    """Return the batch as estimators get it.

    A reward belongs to a sample, and so do its baseline and its weight in the group:

    | samples of a prompt | comparison |
    |---|---|
    | each sample has one reward | sample with sample, whatever their trajectories and roles |
    | a sample has trajectories of different rewards | trajectory with trajectory of the same role |
    | the estimator uses `components`, which belong to a whole sample | sample with sample |

    In the second case a sample's trajectories that share a role and a reward are one response, and all of a sample's
    responses count as one sample (`ScoredBatch.siblings`). So an estimator sees a batch of responses with one reward
    each, and no sample's advantage depends on the number of another sample's trajectories.
    """
    groups = [units for group in batch.groups for units in _compared_units(batch, episodes, group)]
    units, sizes = [unit for group in groups for unit in group], list(map(len, groups))
    lengths = list(map(len, batch.loss_masks))
    rewards = np.array([unit.reward for unit in units], batch.rewards.dtype)
    if sizes == list(batch.group_sizes) and all(unit.spans == [(0, lengths[unit.sample])] for unit in units):
        return Compared(replace(batch, rewards=rewards), None, lengths)
    cut: dict[str, Any] = {
        field.name: [unit.of(value[unit.sample]) for unit in units]
        for field in fields(batch)
        if field.name in _OF_TOKENS and (value := getattr(batch, field.name)) is not None
    }
    turns = None if batch.turns is None else [_within(batch.turns[unit.sample], unit) for unit in units]
    truncated = np.array([unit.truncated for unit in units])
    siblings = np.array([unit.sample for unit in units])
    made = replace(
        batch, rewards=rewards, group_sizes=sizes, truncated=truncated, turns=turns, siblings=siblings, **cut
    )
    return Compared(made, units, lengths)


_OF_TOKENS = (
    "loss_masks",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "values",
    "kl",
)
"""Fields of a batch with an array [T_i] for each sample."""


def _compared_units(batch: ScoredBatch, episodes: Episodes, group: slice) -> list[list[_Unit]]:
    """Return the units of a prompt's samples, in lists of those that are compared with each other."""
    samples = range(group.start, group.stop)
    differ = any(len(set(episodes.rewards[sample] or ())) > 1 for sample in samples)
    if batch.components is not None or not differ:
        return [[_whole(batch, episodes, sample) for sample in samples]]
    by_role: dict[str | None, list[_Unit]] = {}
    for sample in samples:
        for role, unit in _parts(batch, episodes, sample):
            by_role.setdefault(role, []).append(unit)
    return list(by_role.values())


def _whole(batch: ScoredBatch, episodes: Episodes, sample: int) -> _Unit:
    own = set(episodes.rewards[sample] or ())
    reward = own.pop() if len(own) == 1 else float(batch.rewards[sample])
    truncated = batch.truncated is not None and bool(batch.truncated[sample])
    return _Unit(sample, [(0, len(batch.loss_masks[sample]))], reward, truncated)


def _parts(batch: ScoredBatch, episodes: Episodes, sample: int) -> Iterator[tuple[str | None, _Unit]]:
    """Yield the units of a sample with their roles, in the order of their first trajectories."""
    lengths, whole = episodes.lengths[sample], _whole(batch, episodes, sample)
    count = 1 if lengths is None else len(lengths)
    roles = episodes.roles[sample] or [None] * count
    if lengths is None or count == 1:
        yield roles[0], whole
        return
    rewards = episodes.rewards[sample] or [whole.reward] * count
    spans: dict[tuple[str | None, float], list[Span]] = {}
    for role, reward, span in zip(roles, rewards, pairwise([0, *accumulate(lengths)]), strict=True):
        spans.setdefault((role, reward), []).append(span)
    segments = episodes.segments[sample] or ()
    for (role, reward), own in spans.items():
        yield role, _Unit(sample, own, reward, _finish_reason(segments, *own[-1]) == FinishReason.LENGTH)


def _finish_reason(segments: Segments, start: int, end: int) -> str | None:
    """Return the finish reason of the last sampled segment within a span."""
    ends = accumulate(segment["tokens"] for segment in segments)
    within = [
        one["finish_reason"] for one, last in zip(segments, ends, strict=True) if start < last <= end and one["call"]
    ]
    return within[-1] if within else None


def _turns(segments: Segments | None, rewards: Sequence[float | None] | None, total: int) -> list[Turn]:
    if segments is None:
        return [Turn(0, total, rewards[0] if rewards else None)] if total else []
    spans = pairwise([0, *accumulate(segment["tokens"] for segment in segments)])
    turn_rewards = rewards or [None] * len(segments)
    return [
        Turn(*span, reward)
        for segment, span, reward in zip(segments, spans, turn_rewards, strict=True)
        if segment["call"] is not None and span[0] < span[1]
    ]


def _within(turns: Sequence[Turn], unit: _Unit) -> list[Turn]:
    result, before = list[Turn](), 0
    for start, end in unit.spans:
        moved = before - start
        result += [
            Turn(turn.start + moved, turn.end + moved, turn.reward)
            for turn in turns
            if start <= turn.start and turn.end <= end
        ]
        before += end - start
    return result


# Estimators, one a file: `estimate(batch, config) -> (advantages, returns)`, see `cairn.tasks.advantages.batch`. An
# estimator declares the scores that it needs with `cairn.plugin`.


__all__ = ["Estimator", "ScoredBatch", "estimate"]


def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return advantages and returns of a batch, [T_i] float32 of each sample, by `algorithm.advantage_estimator`.

    Raises BadPlugin where the estimator returns anything else.
    """
    name = config.advantage_estimator
    function: Estimator = ESTIMATOR.load(name)
    returned = function(batch, config)
    lengths = [len(mask) for mask in batch.loss_masks]
    try:
        advantages, returns = ([np.asarray(field, np.float32) for field in fields] for fields in returned)
        fits = all([field.shape for field in fields] == [(n,) for n in lengths] for fields in (advantages, returns))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise BadPlugin(
            f"the advantage estimator {name!r} must return (advantages, returns), each with one array for each of the "
            f"{len(lengths)} samples and one number for each response token: correct it"
        )
    return advantages, returns


@durable(
    Step.ADVANTAGE,
    reads=(
        "algorithm.advantage_estimator",
        "algorithm.rewards_normalization",
        "algorithm.grpo_std_normalization",
        "algorithm.normalize_advantages",
        "algorithm.dpo_beta",
        "algorithm.dpo_label_smoothing",
        "algorithm.gdpo_reward_keys",
        "algorithm.gdpo_reward_weights",
        "algorithm.gamma",
        "algorithm.lambd",
        "algorithm.bootstrap_truncated",
        "algorithm.kl_coef",
        "algorithm.kl_loss_type",
        "algorithm.use_opd",
        "algorithm.opd_kl_coef",
        "algorithm.use_rollout_logprobs",
        "training.num_steps_per_rollout",  # the ages of tokens are counted in weight versions
    ),
    beside=True,
)
def advantage(
    step: StepCall, selection: Commit, rollouts: list[Commit], rewards: list[Commit], scores: Commit | None
) -> Outcome:
    """Estimate advantages with `algorithm.advantage_estimator`, one row a sample in the order of the batch.

    Raises NothingLeft where an optimizer step would have no trained token.
    """
    table, metrics = estimated(step.run, step.run.config.algorithm, selection, rollouts, rewards, scores)
    return Outcome(tables={"advantages.parquet": table}, metrics=metrics)


def estimated(
    run: RecordedRun,
    algorithm: AlgorithmConfig,
    selection: Commit,
    rollouts: list[Commit],
    rewards: list[Commit],
    scores: Commit | None,
) -> tuple[pa.Table, dict[str, float]]:
    """Return a table ADVANTAGE of an iteration's trained samples, and its metrics, by any algorithm whose scores exist.

    Raises NothingLeft where an optimizer step would have no trained token.
    """
    columns = ["log_probs", "loss_mask", "weight_versions", "status", "segments"]
    columns += [field.name for field in (TRAJECTORIES, TRAJECTORY_ROLES, TURN_REWARDS)]
    samples = pa.concat_tables(rows_of_groups(run, selection, rollouts, columns)).combine_chunks()
    lengths = samples.column("loss_mask").combine_chunks().value_lengths().to_numpy()
    statuses = samples.column("status").to_pylist()
    rewards_per_group, own_rewards, raw_rewards = _rewards(run, selection, rollouts, rewards)
    rewards_flat = np.concatenate(rewards_per_group)
    masks, ages = trained_tokens(run, selection, samples)
    _require_tokens(masks, run.config.training.num_steps_per_rollout, selection)
    fields: dict[str, Any] = _scores(samples, None if scores is None else run.read(scores), algorithm)
    metrics: dict[str, float] = {}
    if algorithm.kl_coef > 0:
        fields["kl"] = _divergences(fields["old_log_probs"], fields["ref_log_probs"], algorithm.kl_estimator)
        metrics["kl"] = mean_of_trained(fields["kl"], masks)
    if needs_components(algorithm):
        fields["components"] = _components(run, selection, rewards)
    truncated = np.array([status == Status.TRUNCATED for status in statuses])
    sizes = list(map(len, rewards_per_group))
    episodes = _episodes(samples, own_rewards)
    turns = episodes.turns(lengths.tolist())
    rollout_log_probs = arrays(samples, "log_probs")
    batch = ScoredBatch(rewards_flat, sizes, masks, rollout_log_probs, truncated=truncated, turns=turns, **fields)
    units = compared(batch, episodes)
    advantages, returns = map(units.of_samples, estimate(units.batch, algorithm))
    by_role = episodes.role_rewards(rewards_flat.tolist())
    metrics |= {f"role/{role}/reward": mean for role, mean in by_role.items()}
    metrics |= _turn_metrics(turns) if samples.column("segments").null_count < len(turns) else {}
    if algorithm.use_opd:
        divergences = reverse_kl(fields["old_log_probs"], fields["teacher_log_probs"])
        advantages = distil(advantages, divergences, masks, algorithm.opd_kl_coef)
        metrics["opd_reverse_kl"] = mean_of_trained(divergences, masks)
    if algorithm.normalize_advantages:
        advantages = normalise(advantages, masks)
    if weights := stale_weights(run, selection):
        bounds, ids = max_ages(run, selection), samples.column("group_id").to_pylist()
        advantages = [
            own * age_weights(age, bound, weights[id]) if (bound := bounds[id]) is not None and id in weights else own
            for id, age, own in zip(ids, ages, advantages, strict=True)
        ]
        metrics["age/down_weighted_tokens"] = _down_weighted(masks, ages, ids, bounds)
    if rewards:
        metrics["rollout_log_probs"] = mean_of_trained(rollout_log_probs, masks)
    else:
        metrics |= preference_metrics(batch, algorithm)
    table = pa.table(
        {
            "group_id": samples.column("group_id"),
            "sample_index": samples.column("sample_index"),
            "reward": rewards_flat.astype(np.float32),
            "advantages": pa.array(advantages, ADVANTAGE.field("advantages").type),
            "returns": pa.array(returns, ADVANTAGE.field("returns").type),
            "ages": pa.array(ages, ADVANTAGE.field("ages").type),
        },
        ADVANTAGE,
    )
    return table, {
        **sample_metrics(raw_rewards, sampled_lengths(samples), statuses),
        "advantages": mean_of_trained(advantages, masks),
        "returns": mean_of_trained(returns, masks),
        **_age_metrics(masks, ages, arrays(samples, "loss_mask")),
        **metrics,
        **_constant_groups(rewards_per_group),
    }


def _require_tokens(masks: Sequence[np.ndarray], num_steps: int, selection: Commit) -> None:
    for number, samples in enumerate(split_steps(range(len(masks)), num_steps), start=1):
        if not any(masks[sample].any() for sample in samples):
            raise NothingLeft(
                f"optimizer step {number} of {num_steps} of iteration {selection.iteration} has no token to train on: "
                "all its samples (groups fill steps in order) are removed by rollout.rollout_sample_filter_path, "
                "masked or empty; fork the run before this iteration with another filter, or with fewer steps "
                "(training.num_steps_per_rollout)"
            )


def _rewards(
    run: RecordedRun, selection: Commit, rollouts: list[Commit], rewards: list[Commit]
) -> tuple[list[np.ndarray], list[Sequence[float] | None], np.ndarray]:
    """Return the rewards of each group's samples, those of each sample's trajectories, and the graders' raw rewards,
    [R].

    Trajectories without rewards of their own have None. Without grading the first sample of a pair is the preferred
    one: it has reward 1, the other one 0.
    """
    if rewards:
        columns = ["reward", TRAJECTORY_REWARDS.name, RAW_REWARD.name]
        graded = list(rows_of_groups(run, selection, rewards, columns))
        own = [rewards for group in graded for rewards in group.column(TRAJECTORY_REWARDS.name).to_pylist()]
        raw = np.concatenate([as_graded(group).to_numpy() for group in graded])
        return [group.column("reward").to_numpy() for group in graded], own, raw
    pairs = list(rows_of_groups(run, selection, rollouts, []))
    own = [None for pair in pairs for _ in range(pair.num_rows)]
    return [(pair.column("sample_index").to_numpy() == 0).astype(np.float32) for pair in pairs], own, np.zeros(0)


def _components(run: RecordedRun, selection: Commit, rewards: list[Commit]) -> list[dict[str, Any]]:
    """Return reward and components of each sample, by name; an empty list without grading."""
    graded = pa.concat_tables(rows_of_groups(run, selection, rewards, ["reward", "components"]))
    rows = zip(graded.column("reward").to_pylist(), graded.column("components").to_pylist(), strict=True)
    return [by_name(reward, from_json(components) if components else None) for reward, components in rows]


def _episodes(samples: pa.Table, own_rewards: Sequence[Sequence[float] | None]) -> Episodes:
    lengths, roles, segments, turns = (
        samples.column(name).to_pylist()
        for name in (TRAJECTORIES.name, TRAJECTORY_ROLES.name, "segments", TURN_REWARDS.name)
    )
    return Episodes(lengths, own_rewards, roles, segments, turns)


def _divergences(
    log_probs: Sequence[np.ndarray], ref_log_probs: Sequence[np.ndarray], kind: KLType
) -> list[np.ndarray]:
    """Return [T_i] float64 of each sample: estimates of the divergence of the policy from the reference model."""
    current, ref = (torch.tensor(np.concatenate(fields)).double() for fields in (log_probs, ref_log_probs))
    return np.split(kl_divergence(current, ref, kind).numpy(), np.cumsum([len(field) for field in log_probs])[:-1])


def _scores(samples: pa.Table, scored: pa.Table | None, algorithm: AlgorithmConfig) -> dict[str, list[np.ndarray]]:
    """Return [T_i] of each sample for the columns that advantages need, by their names in `ScoredBatch`."""
    scores = {}
    for column in advantage_needs(algorithm):
        if column == "old_log_probs":
            table, name = samples if algorithm.use_rollout_logprobs else scored, "log_probs"
        else:
            table, name = scored, column
        assert table is not None
        scores[column] = arrays(table, name)
    return scores


def _age_metrics(
    masks: Sequence[np.ndarray], ages: Sequence[np.ndarray], rollout_masks: Sequence[np.ndarray]
) -> dict[str, float]:
    """Return the ages of trained tokens, and how many tokens of the batch are not trained on because they are too
    old."""
    mask = np.concatenate(masks).astype(bool)
    trained = np.concatenate(ages)[mask]
    masked = int(np.count_nonzero(np.concatenate(rollout_masks))) - int(mask.sum())
    return {
        "age/mean": float(trained.mean()) if len(trained) else 0.0,
        "age/max": int(trained.max(initial=0)),
        "age/masked_tokens": masked,
    }


def _down_weighted(
    masks: Sequence[np.ndarray], ages: Sequence[np.ndarray], groups: Sequence[int], bounds: Mapping[int, int | None]
) -> int:
    """Return the number of tokens that are trained on although they are too old."""
    rows = zip(masks, ages, (bounds[id] for id in groups), strict=True)
    return sum(int(mask[age > bound].sum()) for mask, age, bound in rows if bound is not None)


def _turn_metrics(turns: Sequence[Sequence[Turn]]) -> dict[str, float]:
    """Return the numbers of turns of the samples, over all trajectories of each."""
    counts = np.array(list(map(len, turns)))
    return {"turns/mean": float(counts.mean()), "turns/max": int(counts.max())}


def _constant_groups(rewards_per_group: Sequence[np.ndarray]) -> dict[str, int]:
    """Return the numbers of groups in which all rewards are equal, by that reward: these groups teach nothing."""
    constant = Counter(float(group[0]) for group in rewards_per_group if np.ptp(group) == 0)
    return {f"zero_std/count_{reward:g}": count for reward, count in sorted(constant.items())}
