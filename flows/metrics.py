"""The metrics of an iteration: a view of its commits. `docs/metrics.md` is generated from `METRICS`.

A step writes its metrics into its commit. They are shown under the step's prefix (`train/`, `eval/`, otherwise
`rollout/`), slime's names where slime has the metric. Everything under `perf/` is computed here, from when steps began
and were committed and from the sizes of their files.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from configs.schema.run import RunConfig
from storage.commits import Commit, Step


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of them: `<…>` in the name stands for what differs."""

    name: str
    unit: str
    source: str
    """The step whose commit holds it, or `timings` or `outputs` of all commits."""
    meaning: str
    is_count: bool = False
    """Shards add up; of other metrics the last commit's value stands."""

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric or one of this family."""
        pattern = "[^/]+".join(re.escape(part) for part in re.split(r"<\w+>", self.name))
        return re.fullmatch(pattern, name) is not None


METRICS: tuple[Metric, ...] = (
    Metric("rollout/raw_reward", "reward", "advantage", "Mean reward of the samples trained on, as graded."),
    Metric("rollout/response_len/mean", "tokens", "advantage", "Their mean response."),
    Metric("rollout/response_len/median", "tokens", "advantage", "Their median response."),
    Metric("rollout/response_len/max", "tokens", "advantage", "Their longest response."),
    Metric("rollout/response_len/min", "tokens", "advantage", "Their shortest response."),
    Metric("rollout/truncated_ratio", "fraction", "advantage", "Of them cut at the longest response allowed."),
    Metric(
        "rollout/zero_std/count_<reward>", "groups", "advantage", "Trained groups whose samples all got this reward."
    ),
    Metric("rollout/advantages", "reward", "advantage", "Mean advantage of their response tokens."),
    Metric("rollout/returns", "reward", "advantage", "Mean return of their response tokens."),
    Metric("rollout/rollout_log_probs", "nats", "advantage", "Mean log-prob of their tokens by the rollout engine."),
    Metric("rollout/log_probs", "nats", "score", "The same by the trainer, under the policy before the update."),
    Metric("rollout/ref_log_probs", "nats", "score", "The same under the reference model."),
    Metric("rollout/samples", "samples", "rollout", "Generated, in all rounds.", is_count=True),
    Metric("rollout/prompt_tokens", "tokens", "rollout", "Of the generated samples.", is_count=True),
    Metric("rollout/response_tokens", "tokens", "rollout", "Generated, in all rounds.", is_count=True),
    Metric("rollout/passed_over_prompts", "prompts", "rollout", "Longer than allowed.", is_count=True),
    Metric("rollout/failed_samples", "samples", "reward", "Grader failed or timed out: no reward.", is_count=True),
    Metric("rollout/rounds", "rounds", "filter", "Rounds of rollout until the batch was full."),
    Metric("rollout/groups", "groups", "filter", "Judged, those from the buffer included."),
    Metric("rollout/buffered", "groups", "filter", "Kept for the next iteration."),
    Metric("rollout/dynamic_filter/drop_<reason>", "groups", "filter", "Dropped, by reason."),
    Metric("train/loss", "", "train", "What the optimizer minimises."),
    Metric("train/pg_loss", "", "train", "Policy loss after clipping."),
    Metric("train/entropy_loss", "nats", "train", "Mean entropy of the policy at a response token."),
    Metric("train/pg_clipfrac", "fraction", "train", "Tokens whose probability ratio was clipped."),
    Metric(
        "train/ppo_kl", "nats", "train", "Mean of old minus current log-prob: the k1 estimate of KL(old ‖ current)."
    ),
    Metric("train/kl_loss", "nats", "train", "KL divergence from the reference model, by `algorithm.kl_loss_type`."),
    Metric(
        "train/train_rollout_logprob_abs_diff",
        "nats",
        "train",
        "Mean |trainer's − rollout engine's| log-prob of a token.",
    ),
    Metric("train/ois", "ratio", "train", "Mean probability ratio of the current over the old policy."),
    Metric("train/tis", "ratio", "train", "Mean ratio of the old over the rollout policy, before truncation."),
    Metric("train/tis_clipfrac", "fraction", "train", "Tokens whose importance weight was truncated."),
    Metric("train/grad_norm", "", "train", "Global gradient norm before clipping."),
    Metric("train/lr", "", "train", "Learning rate, mean over the optimizer steps."),
    Metric("train/tokens", "tokens", "train", "Prompt and response tokens of the batch, padding excluded."),
    Metric("eval/<benchmark>", "reward", "eval", "Mean reward over the benchmark's samples."),
    Metric("eval/<benchmark>-truncated_ratio", "fraction", "eval", "Samples cut at the longest response allowed."),
    Metric("eval/<benchmark>-failed_samples", "samples", "eval", "Grader failed or timed out: no reward."),
    Metric("eval/<benchmark>/response_len/mean", "tokens", "eval", "Mean response."),
    Metric("eval/<benchmark>/response_len/max", "tokens", "eval", "Longest response."),
    Metric("perf/step_time", "s", "timings", "The iteration, from the start of its first step to its last commit."),
    Metric("perf/rollout_time", "s", "timings", "From the first rollout's start to the last filter's commit."),
    Metric("perf/log_probs_time", "s", "timings", "`score`."),
    Metric("perf/actor_train_time", "s", "timings", "`train`."),
    Metric("perf/save_model_time", "s", "timings", "`checkpoint`."),
    Metric("perf/update_weights_time", "s", "timings", "`sync`."),
    Metric("perf/eval_time", "s", "timings", "`eval`."),
    Metric("perf/snapshot_bytes", "bytes", "outputs", "Committed files of the iteration but its checkpoint's."),
    Metric("perf/checkpoint_bytes", "bytes", "outputs", "Files of its restore point."),
    Metric(
        "perf/other_time", "s", "timings", "`perf/step_time` in which no step was at work: what orchestration costs."
    ),
    Metric(
        "perf/tokens_per_gpu_per_sec",
        "tokens/s",
        "timings",
        "Generated tokens per second of `perf/rollout_time`, per rollout GPU; per rollout engine where it has none.",
    ),
    Metric(
        "perf/actor_train_tok_per_s", "tokens/s", "timings", "Trained tokens per second of `perf/actor_train_time`."
    ),
)

_PREFIX = {Step.TRAIN: "train/", Step.EVAL: "eval/"}
_TIMES = {
    "perf/log_probs_time": Step.SCORE,
    "perf/actor_train_time": Step.TRAIN,
    "perf/save_model_time": Step.CHECKPOINT,
    "perf/update_weights_time": Step.SYNC,
    "perf/eval_time": Step.EVAL,
}
_ROLLOUT = (Step.ROLLOUT, Step.REWARD, Step.FILTER)


def find_metric(name: str) -> Metric | None:
    """The entry of `METRICS` that documents `name`; a literal name goes before a family."""
    fitting = [metric for metric in METRICS if metric.matches(name)]
    return min(fitting, key=lambda metric: (metric.name.count("<"), -len(metric.name)), default=None)


def shown_metrics(commit: Commit) -> dict[str, float]:
    """The metrics of one commit under the names of `METRICS`."""
    prefix = _PREFIX.get(commit.step, "rollout/")
    return {prefix + name.removeprefix(prefix): value for name, value in commit.metrics.items()}


def iteration_metrics(commits: Iterable[Commit], config: RunConfig) -> dict[str, float]:
    """All metrics of one iteration but its evaluations, from its commits, in no particular order."""
    commits = sorted(commits, key=lambda commit: (commit.committed_at, commit.name))
    metrics: dict[str, float] = {}
    for commit in commits:
        if commit.step is not Step.EVAL:
            for name, value in shown_metrics(commit).items():
                metric = find_metric(name)
                adds_up = metric is not None and metric.is_count
                metrics[name] = metrics.get(name, 0.0) + value if adds_up else value
    return metrics | _performance(commits, metrics, config)


def eval_metrics(commits: Iterable[Commit], config: RunConfig) -> dict[int, dict[str, float]]:
    """The metrics of evaluations by the number of iterations that the evaluated weights were trained for."""
    points: dict[int, dict[str, float]] = {}
    for commit in commits:
        if commit.step is Step.EVAL:
            trained = (commit.weight_version_in or 0) // config.training.num_steps_per_rollout
            points.setdefault(trained, {}).update(shown_metrics(commit))
    return points


def step_seconds(commits: Iterable[Commit]) -> dict[Step, float]:
    """Seconds in which at least one shard of a step was at work, by step."""
    commits = list(commits)
    return {step: busy for step in Step if (busy := _busy(commit for commit in commits if commit.step is step)) > 0}


def _performance(commits: Sequence[Commit], metrics: dict[str, float], config: RunConfig) -> dict[str, float]:
    seconds = step_seconds(commits)
    performance = {name: seconds[step] for name, step in _TIMES.items() if step in seconds}
    whole = _span(commits)
    performance["perf/step_time"] = whole
    performance["perf/other_time"] = max(0.0, whole - _busy(commits))
    saved = _bytes(commit for commit in commits if commit.step is Step.CHECKPOINT)
    performance["perf/snapshot_bytes"] = _bytes(commits) - saved
    if Step.CHECKPOINT in seconds:
        performance["perf/checkpoint_bytes"] = saved
    rollout_time = _span([commit for commit in commits if commit.step in _ROLLOUT])
    performance["perf/rollout_time"] = rollout_time
    gpus = config.rollout.num_engines * (config.rollout.num_gpus_per_engine or 1)
    if rollout_time > 0 and "rollout/response_tokens" in metrics:
        performance["perf/tokens_per_gpu_per_sec"] = metrics["rollout/response_tokens"] / rollout_time / gpus
    if seconds.get(Step.TRAIN) and "train/tokens" in metrics:
        performance["perf/actor_train_tok_per_s"] = metrics["train/tokens"] / seconds[Step.TRAIN]
    return performance


def _bytes(commits: Iterable[Commit]) -> int:
    return sum(output.bytes for commit in commits for output in commit.outputs)


def _span(commits: Sequence[Commit]) -> float:
    """Seconds from the first start to the last commit; the time between two drivers does not count."""
    spans = 0.0
    for epoch in {commit.epoch for commit in commits}:
        own = [commit for commit in commits if commit.epoch == epoch]
        spans += max(commit.committed_at for commit in own) - min(commit.started_at for commit in own)
    return spans


def _busy(commits: Iterable[Commit]) -> float:
    """Seconds covered by at least one of the commits."""
    busy, until = 0.0, float("-inf")
    for start, end in sorted((commit.started_at, commit.committed_at) for commit in commits):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy
