"""`advantage`: per-token advantages and returns of the kept samples, a pure function of rewards and scores."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.losses.kl import kl_divergence
from cairn.engines.training.needs import advantage_needs
from cairn.storage.commits import Commit, Step
from cairn.storage.schemas import ADVANTAGE
from cairn.tasks.advantages import ScoredBatch, estimate
from cairn.tasks.advantages.distillation import distil, reverse_kl
from cairn.tasks.advantages.normalization import normalise
from cairn.tasks.batch import arrays, rows_of_groups, trained_tokens
from cairn.tasks.sample_metrics import sample_metrics
from cairn.tasks.step import Outcome, StepCall, durable


@durable(
    Step.ADVANTAGE,
    reads=(
        "algorithm.advantage_estimator",
        "algorithm.rewards_normalization",
        "algorithm.grpo_std_normalization",
        "algorithm.normalize_advantages",
        "algorithm.gamma",
        "algorithm.lambd",
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
    """Estimate advantages with `algorithm.advantage_estimator`, one row a sample in the order of the batch."""
    run = step.run
    graded = list(rows_of_groups(run, selection, rewards, ["reward"]))
    columns = ["response_ids", "log_probs", "loss_mask", "weight_versions", "status"]
    samples = pa.concat_tables(rows_of_groups(run, selection, rollouts, columns)).combine_chunks()
    lengths = samples.column("response_ids").combine_chunks().value_lengths().to_numpy()
    algorithm = run.config.algorithm
    rewards_per_group = [group.column("reward").to_numpy() for group in graded]
    rewards_flat = np.concatenate(rewards_per_group)
    masks, ages = trained_tokens(run, selection, samples)
    fields = _scores(samples, None if scores is None else run.read(scores), algorithm)
    metrics = {}
    if algorithm.kl_coef > 0:
        pairs = zip(fields["old_log_probs"], fields["ref_log_probs"], strict=True)
        fields["kl"] = [
            kl_divergence(torch.tensor(current).double(), torch.tensor(ref).double(), algorithm.kl_estimator).numpy()
            for current, ref in pairs
        ]
        metrics["kl"] = _mean_of_trained(fields["kl"], masks)
    sizes = list(map(len, rewards_per_group))
    batch = ScoredBatch(rewards_flat, sizes, masks, arrays(samples, "log_probs"), **fields)
    advantages, returns = estimate(batch, algorithm)
    if algorithm.use_opd:
        divergences = reverse_kl(fields["old_log_probs"], fields["teacher_log_probs"])
        advantages = distil(advantages, divergences, masks, algorithm.opd_kl_coef)
        metrics["opd_reverse_kl"] = _mean_of_trained(divergences, masks)
    if algorithm.normalize_advantages:
        advantages = normalise(advantages, masks)
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
    return Outcome(
        tables={"advantages.parquet": table},
        metrics={
            **sample_metrics(rewards_flat, lengths, samples.column("status").to_pylist()),
            "advantages": float(np.concatenate(advantages).mean()),
            "returns": float(np.concatenate(returns).mean()),
            "rollout_log_probs": float(samples.column("log_probs").combine_chunks().flatten().to_numpy().mean()),
            **_age_metrics(masks, ages, arrays(samples, "loss_mask")),
            **metrics,
            **_constant_groups(rewards_per_group),
        },
    )


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


def _mean_of_trained(fields: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> float:
    return float(np.concatenate(fields)[np.concatenate(masks).astype(bool)].mean())


def _constant_groups(rewards_per_group: Sequence[np.ndarray]) -> dict[str, int]:
    """Groups whose samples all have one reward, by that reward: they teach nothing."""
    constant = Counter(float(group[0]) for group in rewards_per_group if np.ptp(group) == 0)
    return {f"zero_std/count_{reward:g}": count for reward, count in sorted(constant.items())}
