"""`advantage`: per-token advantages and returns of the kept samples, a pure function of rewards and scores."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from cairn.configs.schema.algorithm import AlgorithmConfig, KLType
from cairn.engines.training.batching import split_steps
from cairn.engines.training.losses.kl import kl_divergence
from cairn.engines.training.needs import advantage_needs, needs_components
from cairn.storage.canonical import from_json
from cairn.storage.commits import Commit, Step
from cairn.storage.schemas import (
    ADVANTAGE,
    RAW_REWARD,
    TRAJECTORIES,
    TRAJECTORY_REWARDS,
    TRAJECTORY_ROLES,
    TURN_REWARDS,
    Status,
)
from cairn.tasks.advantages import ScoredBatch, estimate
from cairn.tasks.advantages.batch import Turn
from cairn.tasks.advantages.distillation import distil, reverse_kl
from cairn.tasks.advantages.dpo import preference_metrics
from cairn.tasks.advantages.normalization import normalise
from cairn.tasks.advantages.trajectories import Episodes, compared
from cairn.tasks.batch import age_weights, arrays, mean_of_trained, rows_of_groups, trained_tokens
from cairn.tasks.recorded_run import RecordedRun
from cairn.tasks.rewards.components import by_name
from cairn.tasks.rewards.overlong import as_graded
from cairn.tasks.sample_filters import NothingLeft
from cairn.tasks.sample_metrics import sample_metrics, sampled_lengths
from cairn.tasks.selection import max_ages, stale_weights
from cairn.tasks.step import Outcome, StepCall, durable


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
)
def advantage(
    step: StepCall, selection: Commit, rollouts: list[Commit], rewards: list[Commit], scores: Commit | None
) -> Outcome:
    """Estimate advantages with `algorithm.advantage_estimator`, one row a sample in the order of the batch. Raises
    NothingLeft where an optimizer step would have no trained token."""
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
    """A table ADVANTAGE of the trained samples of an iteration, and its metrics, by any algorithm whose scores are
    there. Raises NothingLeft."""
    columns = ["response_ids", "log_probs", "loss_mask", "weight_versions", "status", "segments"]
    columns += [field.name for field in (TRAJECTORIES, TRAJECTORY_ROLES, TURN_REWARDS)]
    samples = pa.concat_tables(rows_of_groups(run, selection, rollouts, columns)).combine_chunks()
    lengths = samples.column("response_ids").combine_chunks().value_lengths().to_numpy()
    statuses = samples.column("status").to_pylist()
    rewards_per_group, own_rewards, said = _rewards(run, selection, rollouts, rewards)
    rewards_flat = np.concatenate(rewards_per_group)
    masks, ages = trained_tokens(run, selection, samples)
    _require_tokens(masks, run.config.training.num_steps_per_rollout, selection)
    fields: dict[str, Any] = _scores(samples, None if scores is None else run.read(scores), algorithm)
    found: dict[str, float] = {}
    if algorithm.kl_coef > 0:
        fields["kl"] = _divergences(fields["old_log_probs"], fields["ref_log_probs"], algorithm.kl_estimator)
        found["kl"] = mean_of_trained(fields["kl"], masks)
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
    found |= {f"role/{role}/reward": mean for role, mean in by_role.items()}
    found |= _turn_metrics(turns) if samples.column("segments").null_count < len(turns) else {}
    if algorithm.use_opd:
        divergences = reverse_kl(fields["old_log_probs"], fields["teacher_log_probs"])
        advantages = distil(advantages, divergences, masks, algorithm.opd_kl_coef)
        found["opd_reverse_kl"] = mean_of_trained(divergences, masks)
    if algorithm.normalize_advantages:
        advantages = normalise(advantages, masks)
    if weights := stale_weights(run, selection):
        bounds, ids = max_ages(run, selection), samples.column("group_id").to_pylist()
        advantages = [
            own * age_weights(age, bound, weights[id]) if (bound := bounds[id]) is not None and id in weights else own
            for id, age, own in zip(ids, ages, advantages, strict=True)
        ]
        found["age/down_weighted_tokens"] = _down_weighted(masks, ages, ids, bounds)
    if rewards:
        found["rollout_log_probs"] = mean_of_trained(rollout_log_probs, masks)
    else:
        found |= preference_metrics(batch, algorithm)
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
        **sample_metrics(said, sampled_lengths(samples), statuses),
        "advantages": mean_of_trained(advantages, masks),
        "returns": mean_of_trained(returns, masks),
        **_age_metrics(masks, ages, arrays(samples, "loss_mask")),
        **found,
        **_constant_groups(rewards_per_group),
    }


def _require_tokens(masks: Sequence[np.ndarray], num_steps: int, selection: Commit) -> None:
    for number, samples in enumerate(split_steps(range(len(masks)), num_steps), start=1):
        if not any(masks[sample].any() for sample in samples):
            raise NothingLeft(
                f"optimizer step {number} of {num_steps} of iteration {selection.iteration} has no token to train on: "
                "of its samples, which groups fill in their order, all are removed by "
                "rollout.rollout_sample_filter_path, masked or empty; fork the run before this iteration with another "
                "filter, or with fewer steps (training.num_steps_per_rollout)"
            )


def _rewards(
    run: RecordedRun, selection: Commit, rollouts: list[Commit], rewards: list[Commit]
) -> tuple[list[np.ndarray], list[Sequence[float] | None], np.ndarray]:
    """Of the samples of each group; where nobody grades, the first of a pair is preferred: 1, and the other 0. And of
    each sample those of its trajectories, where they have their own; and [R] what graders said of all samples."""
    if rewards:
        columns = ["reward", TRAJECTORY_REWARDS.name, RAW_REWARD.name]
        graded = list(rows_of_groups(run, selection, rewards, columns))
        own = [rewards for group in graded for rewards in group.column(TRAJECTORY_REWARDS.name).to_pylist()]
        said = np.concatenate([as_graded(group).to_numpy() for group in graded])
        return [group.column("reward").to_numpy() for group in graded], own, said
    pairs = list(rows_of_groups(run, selection, rollouts, []))
    own = [None for pair in pairs for _ in range(pair.num_rows)]
    return [(pair.column("sample_index").to_numpy() == 0).astype(np.float32) for pair in pairs], own, np.zeros(0)


def _components(run: RecordedRun, selection: Commit, rewards: list[Commit]) -> list[dict[str, Any]]:
    """What was said of each sample, by its names; none where nobody grades."""
    graded = pa.concat_tables(rows_of_groups(run, selection, rewards, ["reward", "components"]))
    rows = zip(graded.column("reward").to_pylist(), graded.column("components").to_pylist(), strict=True)
    return [by_name(reward, from_json(said) if said else None) for reward, said in rows]


def _episodes(samples: pa.Table, own_rewards: Sequence[Sequence[float] | None]) -> Episodes:
    lengths, roles, segments, turns = (
        samples.column(name).to_pylist()
        for name in (TRAJECTORIES.name, TRAJECTORY_ROLES.name, "segments", TURN_REWARDS.name)
    )
    return Episodes(lengths, own_rewards, roles, segments, turns)


def _divergences(
    log_probs: Sequence[np.ndarray], ref_log_probs: Sequence[np.ndarray], kind: KLType
) -> list[np.ndarray]:
    """[T_i] float64 of each sample: estimates of the divergence of the policy from the reference model."""
    current, ref = (torch.tensor(np.concatenate(fields)).double() for fields in (log_probs, ref_log_probs))
    return np.split(kl_divergence(current, ref, kind).numpy(), np.cumsum([len(field) for field in log_probs])[:-1])


def _scores(samples: pa.Table, scored: pa.Table | None, algorithm: AlgorithmConfig) -> dict[str, list[np.ndarray]]:
    """[T_i] of each sample: the columns that advantages need, by their names in `ScoredBatch`."""
    found = {}
    for column in advantage_needs(algorithm):
        if column == "old_log_probs":
            table, name = samples if algorithm.use_rollout_logprobs else scored, "log_probs"
        else:
            table, name = scored, column
        assert table is not None
        found[column] = arrays(table, name)
    return found


def _age_metrics(
    masks: Sequence[np.ndarray], ages: Sequence[np.ndarray], rollout_masks: Sequence[np.ndarray]
) -> dict[str, float]:
    """Of the trained tokens, and how many of the batch's are not trained on since they are too old."""
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
    """Tokens that are trained on though they are too old."""
    rows = zip(masks, ages, (bounds[id] for id in groups), strict=True)
    return sum(int(mask[age > bound].sum()) for mask, age, bound in rows if bound is not None)


def _turn_metrics(turns: Sequence[Sequence[Turn]]) -> dict[str, float]:
    """Turns of samples, of all trajectories of each."""
    counts = np.array(list(map(len, turns)))
    return {"turns/mean": float(counts.mean()), "turns/max": int(counts.max())}


def _constant_groups(rewards_per_group: Sequence[np.ndarray]) -> dict[str, int]:
    """Groups whose samples all have one reward, by that reward: they teach nothing."""
    constant = Counter(float(group[0]) for group in rewards_per_group if np.ptp(group) == 0)
    return {f"zero_std/count_{reward:g}": count for reward, count in sorted(constant.items())}
