"""The metrics of an iteration: a view of its commits. `docs/metrics.md` is generated from `METRICS`.

A step writes its metrics into its commit. They are shown with the step's prefix (`train/`, `eval/`, otherwise
`rollout/`; `age/` is a prefix of its own), under slime's names where slime has the metric. Everything under `perf/` is
computed here, from start and commit times of steps and from the sizes of their files.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cairn.configs.schema.run import RunConfig
from cairn.engines.plan.peaks import peak_tflops
from cairn.engines.rollout.plan import kind_of
from cairn.flows.text import duration
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger


@dataclass(frozen=True)
class Metric:
    """A metric, or a family of them: `<…>` in the name is the variable part."""

    name: str
    unit: str
    source: str
    """The step whose commit contains it, or `timings` or `outputs` of all commits, or `waits`: timings of these and of
    earlier iterations."""
    meaning: str
    is_count: bool = False
    """Whether the values of shards are added. Other metrics have the last commit's value, or their maximum."""
    is_maximum: bool = False
    """Whether the largest value of the shards counts."""

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric or belongs to this family."""
        pattern = "[^/]+".join(re.escape(part) for part in re.split(r"<\w+>", self.name))
        return re.fullmatch(pattern, name) is not None


METRICS: tuple[Metric, ...] = (
    Metric(
        "rollout/raw_reward",
        "reward",
        "filter",
        "Mean graded reward of all samples that the iteration generated and finished, including those that the "
        "filter drops; samples that could not be graded are left out.",
    ),
    Metric("rollout/response_len/mean", "tokens", "filter", "Their mean response length, in sampled tokens."),
    Metric("rollout/response_len/median", "tokens", "filter", "Their median response length."),
    Metric("rollout/response_len/max", "tokens", "filter", "Their maximum response length."),
    Metric("rollout/response_len/min", "tokens", "filter", "Their minimum response length."),
    Metric(
        "rollout/truncated_ratio", "fraction", "filter", "Share of them that was cut at the maximum response length."
    ),
    Metric(
        "rollout/source/<source>/raw_reward",
        "reward",
        "filter",
        "Mean reward of the samples from one source of `data.mixture`.",
    ),
    Metric("rollout/source/<source>/samples", "samples", "filter", "Number of these samples."),
    Metric("rollout/trained/raw_reward", "reward", "advantage", "Mean graded reward of the samples trained on."),
    Metric("rollout/trained/response_len/mean", "tokens", "advantage", "Their mean response length."),
    Metric("rollout/trained/response_len/median", "tokens", "advantage", "Their median response length."),
    Metric("rollout/trained/response_len/max", "tokens", "advantage", "Their maximum response length."),
    Metric("rollout/trained/response_len/min", "tokens", "advantage", "Their minimum response length."),
    Metric(
        "rollout/trained/truncated_ratio",
        "fraction",
        "advantage",
        "Share of them that was cut at the maximum response length.",
    ),
    Metric(
        "rollout/zero_std/count_<reward>", "groups", "advantage", "Trained groups whose samples all got this reward."
    ),
    Metric("rollout/role/<role>/reward", "reward", "advantage", "Mean reward of a role, over samples that have it."),
    Metric(
        "rollout/turns/mean",
        "turns",
        "advantage",
        "Mean number of turns of the samples trained on, if any has several.",
    ),
    Metric("rollout/turns/max", "turns", "advantage", "Maximum number of these turns."),
    Metric("rollout/advantages", "reward", "advantage", "Mean advantage of the trained tokens."),
    Metric("rollout/returns", "reward", "advantage", "Mean return of the trained tokens."),
    Metric("rollout/rollout_log_probs", "nats", "advantage", "Mean log-prob of these tokens by the rollout engine."),
    Metric("rollout/log_probs", "nats", "score", "The same by the trainer, under the policy before the update."),
    Metric("rollout/ref_log_probs", "nats", "score", "The same under the reference model."),
    Metric("rollout/teacher_log_probs", "nats", "score", "The same under the teacher."),
    Metric("rollout/opd_reverse_kl", "nats", "advantage", "Mean log-prob of the trained tokens minus the teacher's."),
    Metric(
        "rollout/values",
        "reward",
        "score",
        "Mean value of the trained tokens' states, by the critic before the update.",
    ),
    Metric(
        "rollout/kl", "nats", "advantage", "Mean KL divergence from the reference model, as subtracted from rewards."
    ),
    Metric("rollout/dpo/loss", "nats", "advantage", "Mean loss of the pairs, under the policy before the update."),
    Metric("rollout/dpo/rewards/chosen", "nats", "advantage", "Mean β log π/π_ref of the preferred responses."),
    Metric("rollout/dpo/rewards/rejected", "nats", "advantage", "The same for the rejected responses."),
    Metric("rollout/dpo/rewards/margins", "nats", "advantage", "Mean difference of the two."),
    Metric(
        "rollout/dpo/rewards/accuracies", "fraction", "advantage", "Share of pairs in which this difference is above 0."
    ),
    Metric("rollout/dpo/logps/chosen", "nats", "advantage", "Mean log-prob of the preferred responses."),
    Metric("rollout/dpo/logps/rejected", "nats", "advantage", "The same for the rejected responses."),
    Metric("rollout/samples", "samples", "rollout", "Generated samples, in all rounds.", is_count=True),
    Metric(
        "rollout/prompt_tokens",
        "tokens",
        "rollout",
        "Tokens passed to the engine: prompts of the generated samples, and responses that were continued.",
        is_count=True,
    ),
    Metric(
        "rollout/open_groups",
        "groups",
        "rollout",
        "In the `streaming` pipeline: admitted groups that were left for later rounds when the last round took its "
        "groups.",
    ),
    Metric(
        "rollout/engines",
        "engines",
        "rollout",
        "In the `streaming` pipeline: rollout engines that served when the last round took its groups.",
    ),
    Metric(
        "rollout/interrupted_samples",
        "samples",
        "rollout",
        "In the `streaming` pipeline: interruptions of samples, to continue with newer weights or together with "
        "others, since the previous iteration.",
        is_count=True,
    ),
    Metric(
        "rollout/recomputed_tokens",
        "tokens",
        "rollout",
        "In the `streaming` pipeline: response tokens that engines read again to continue after them.",
        is_count=True,
    ),
    Metric(
        "rollout/cached_tokens",
        "tokens",
        "rollout",
        "Of `rollout/prompt_tokens`, those found in a server's prefix cache.",
        is_count=True,
    ),
    Metric(
        "rollout/<engine>/running_requests_max",
        "samples",
        "rollout",
        "Maximum number that the engine decoded at a time.",
        is_maximum=True,
    ),
    Metric(
        "rollout/<engine>/queued_requests_max",
        "samples",
        "rollout",
        "Maximum number that waited in the engine at a time.",
        is_maximum=True,
    ),
    Metric(
        "rollout/<engine>/tokens_in_flight_max",
        "tokens",
        "rollout",
        "Maximum number of tokens of the samples in the engine at a time, if `rollout.max_tokens_in_flight` limits "
        "them.",
        is_maximum=True,
    ),
    Metric("rollout/<engine>/restarts", "restarts", "rollout", "Restarts of the engine since the driver started."),
    Metric(
        "rollout/<engine>/episode_worker_restarts",
        "restarts",
        "rollout",
        "Restarts of the workers that run its episodes, since the driver started.",
    ),
    Metric("rollout/response_tokens", "tokens", "rollout", "Generated response tokens, in all rounds.", is_count=True),
    Metric(
        "rollout/sampled_tokens",
        "tokens",
        "rollout",
        "With your own generate function: tokens of all samples that the policy sampled, without those of the "
        "environment.",
        is_count=True,
    ),
    Metric(
        "rollout/retold_tokens",
        "tokens",
        "rollout",
        "Of these, tokens that differ from the sampled ones in the history of a later prompt.",
        is_count=True,
    ),
    Metric("rollout/retold_ratio", "fraction", "rollout", "`rollout/retold_tokens` / `rollout/sampled_tokens`."),
    Metric(
        "rollout/policy_calls",
        "calls",
        "rollout",
        "Calls of the policy, by the code of samples whose calls are recorded.",
        is_count=True,
    ),
    Metric("rollout/policy_calls/mean", "calls", "rollout", "The same per sample, of `rollout/samples`."),
    Metric("rollout/policy_calls/max", "calls", "rollout", "The maximum of one sample.", is_maximum=True),
    Metric("rollout/tool_calls", "calls", "rollout", "Calls of tools, by the code of samples.", is_count=True),
    Metric("rollout/tool_failures", "calls", "rollout", "Failed calls of tools.", is_count=True),
    Metric("rollout/tool_failures/<tool>", "calls", "rollout", "The same for one tool.", is_count=True),
    Metric("rollout/tool_seconds", "s", "rollout", "Total time of the calls of tools.", is_count=True),
    Metric(
        "rollout/world_tokens",
        "tokens",
        "rollout",
        "Response tokens from the environment, not sampled, in samples whose calls are recorded.",
        is_count=True,
    ),
    Metric("rollout/world_tokens_ratio", "fraction", "rollout", "`rollout/world_tokens` / `rollout/response_tokens`."),
    Metric(
        "rollout/generated_groups", "groups", "rollout", "Groups that the committed attempts generated.", is_count=True
    ),
    Metric("rollout/step", "steps", "rollout", "Step of the trainer that made an imported run."),
    Metric("rollout/recovered_groups", "groups", "rollout", "Groups reused from interrupted attempts.", is_count=True),
    Metric("rollout/continued_groups", "groups", "rollout", "Groups continued after an abort.", is_count=True),
    Metric("rollout/aborted_groups", "groups", "rollout", "Groups left unfinished by partial rollout.", is_count=True),
    Metric(
        "rollout/failed/<name>",
        "samples",
        "rollout",
        "Samples that failed during generation, by the name of the error: `EpisodeTimeout`, `GenerateTimeout`, "
        "`LoopBlocked`, `ToolFailed` or another error of the code; `refused`: by the engine.",
        is_count=True,
    ),
    Metric(
        "rollout/passed_over_prompts",
        "prompts",
        "rollout",
        "Skipped prompts: longer than allowed, refused by the chat template, without text, or with nothing to learn.",
        is_count=True,
    ),
    Metric(
        "rollout/cut_rows",
        "rows",
        "rollout",
        "Demonstrations longer than `data.max_length`, whose end was cut off.",
        is_count=True,
    ),
    Metric(
        "rollout/failed_samples",
        "samples",
        "reward",
        "Samples without a reward, because generation or grading failed or timed out.",
        is_count=True,
    ),
    Metric(
        "rollout/graded_again",
        "samples",
        "reward",
        "Samples graded more than once, because a service did not respond, or the machine killed or starved the "
        "grader's process.",
        is_count=True,
    ),
    Metric("rollout/rounds", "rounds", "filter", "Rounds of rollout until the batch was full."),
    Metric("rollout/groups", "groups", "filter", "Judged groups, including those from the buffer."),
    Metric("rollout/buffered", "groups", "filter", "Groups stored for the next iteration."),
    Metric("rollout/unfinished", "groups", "filter", "Groups that wait to be continued."),
    Metric("rollout/dynamic_filter/drop_<reason>", "groups", "filter", "Dropped groups, by reason."),
    Metric("age/mean", "publications", "advantage", "Mean age of the trained tokens."),
    Metric("age/max", "publications", "advantage", "Maximum age of the trained tokens."),
    Metric(
        "age/masked_tokens",
        "tokens",
        "advantage",
        "Tokens of the trained groups that were not trained on because they are older than `rollout.max_age`.",
    ),
    Metric(
        "age/stale_tokens",
        "tokens",
        "filter",
        "Tokens of streamed groups that are older than `rollout.max_age`, and so masked, dropped or down-weighted by "
        "`rollout.staleness_policy`. By prompt: `stale_tokens` of the view `groups`.",
    ),
    Metric("age/down_weighted_tokens", "tokens", "advantage", "Of these, tokens trained on with less weight."),
    Metric(
        "age/dropped_groups",
        "groups",
        "filter",
        "Surplus groups that passed the filter, but were dropped because the next iteration could not train on them: "
        "all of them, unless `rollout.max_age` is above 0.",
    ),
    Metric("train/loss", "", "train", "The loss that the optimizer minimises."),
    Metric("train/pg_loss", "", "train", "Policy loss after clipping."),
    Metric("train/entropy_loss", "nats", "train", "Mean entropy of the policy at a response token."),
    Metric("train/pg_clipfrac", "fraction", "train", "Tokens whose probability ratio was clipped."),
    Metric(
        "train/ppo_kl", "nats", "train", "Mean of old minus current log-prob: the k1 estimate of KL(old ‖ current)."
    ),
    Metric("train/kl_loss", "nats", "train", "KL divergence from the reference model, by `algorithm.kl_loss_type`."),
    Metric(
        "train/distillation_loss",
        "nats",
        "train",
        "The loss `forward_kl_topk` in addition to another loss: divergence from the teacher, over its most probable "
        "tokens.",
    ),
    Metric("train/teacher_mass", "fraction", "train", "Probability of these tokens under the teacher."),
    Metric("train/student_mass", "fraction", "train", "Probability of these tokens under the policy."),
    Metric(
        "train/train_rollout_logprob_abs_diff",
        "nats",
        "train",
        "Mean absolute difference of a token's log-prob between trainer and rollout engine.",
    ),
    Metric("train/train_rollout_logprob_abs_diff_max", "nats", "train", "Maximum of this difference."),
    Metric(
        "train/routing_mismatch",
        "fraction",
        "train",
        "Experts that the rollout chose, but the trainer's router would not choose for the same input.",
    ),
    Metric("train/ois", "ratio", "train", "Mean probability ratio of the current over the old policy."),
    Metric("train/tis", "ratio", "train", "Mean ratio of the old over the rollout policy, before truncation."),
    Metric("train/tis_clipfrac", "fraction", "train", "Tokens whose importance weight was truncated."),
    Metric("train/tis_batch_norm", "", "train", "Mean importance weight, by which `tis_batch_normalize` divides."),
    Metric("train/rs_rejected", "fraction", "train", "Tokens whose ratio was outside of the bounds of rejection."),
    Metric("train/rs_vetoed", "fraction", "train", "Tokens of responses with a token below `rs_veto_threshold`."),
    Metric("train/opsm_clipfrac", "fraction", "train", "Tokens that off-policy sequence masking leaves out."),
    Metric(
        "train/mis_kl", "nats", "train", "Mean rollout engine's minus trainer's log-prob: k1 of KL(rollout ‖ trainer)."
    ),
    Metric("train/mis_k3_kl", "nats", "train", "The k3 estimate of the same."),
    Metric("train/mis_training_log_ppl", "nats", "train", "Mean −log-prob of a response's tokens by the trainer."),
    Metric(
        "train/mis_training_ppl", "", "train", "Perplexity of a response under the trainer, averaged over responses."
    ),
    Metric(
        "train/mis_rollout_log_ppl", "nats", "train", "Mean −log-prob of a response's tokens by the rollout engine."
    ),
    Metric("train/mis_rollout_ppl", "", "train", "Perplexity of a response under the rollout engine."),
    Metric("train/mis_log_ppl_diff", "nats", "train", "Trainer's minus rollout engine's log-perplexity of a response."),
    Metric("train/mis_log_ppl_abs_diff", "nats", "train", "Absolute value of this difference."),
    Metric(
        "train/mis_ppl_ratio",
        "ratio",
        "train",
        "Perplexity under the trainer divided by that under the rollout engine.",
    ),
    Metric("train/mis_chi2_token", "", "train", "χ² of trainer and rollout engine, over tokens."),
    Metric("train/mis_chi2_seq", "", "train", "χ² of trainer and rollout engine, over responses."),
    Metric("train/mis_outside", "fraction", "train", "Tokens whose ratio is outside of `tis_clip_low` and `tis_clip`."),
    Metric("train/grad_norm", "", "train", "Global gradient norm before clipping."),
    Metric("train/lr", "", "train", "Learning rate, mean over the optimizer steps."),
    Metric("train/value_loss", "reward²", "train", "Clipped squared error of the critic's values."),
    Metric("train/value_clipfrac", "fraction", "train", "Tokens whose value moved further than `value_clip`."),
    Metric("train/critic_grad_norm", "", "train", "The critic's global gradient norm before clipping."),
    Metric("train/critic_lr", "", "train", "The critic's learning rate, mean over the optimizer steps."),
    Metric(
        "train/flops",
        "FLOP",
        "train",
        "Model FLOPs of the actor's update, 6 N + 12 L H Q T a token (PaLM, appendix B); see `engines/plan/rates.py`.",
    ),
    Metric("train/tokens", "tokens", "train", "Prompt and response tokens of the batch, padding excluded."),
    Metric(
        "eval/<benchmark>",
        "reward",
        "eval",
        "Score of the benchmark, by its `metric`; `mean` is the mean reward over all samples; a failed sample counts "
        "as wrong: 0, or the lowest reward of the others if that is lower.",
    ),
    Metric(
        "eval/<benchmark>-graded",
        "reward",
        "eval",
        "Mean reward over the samples that were graded, failed ones left out.",
    ),
    Metric(
        "eval/<benchmark>-truncated_ratio",
        "fraction",
        "eval",
        "Share of samples that was cut at the maximum response length.",
    ),
    Metric("eval/<benchmark>-failed_samples", "samples", "eval", "Generation or grading failed or timed out."),
    Metric("eval/<benchmark>-graded_again", "samples", "eval", "Graded more than once, as in training."),
    Metric("eval/<benchmark>/metric/<name>", "", "eval", "Additional values of your own `metric` for the benchmark."),
    Metric("eval/<benchmark>/response_len/mean", "tokens", "eval", "Mean response length."),
    Metric("eval/<benchmark>/response_len/max", "tokens", "eval", "Maximum response length."),
    Metric(
        "alarm/<name>",
        "",
        "all",
        "1 while the alarm is raised, else 0; for the alarms set in `tracking.alarms`, once there are enough "
        "iterations.",
    ),
    Metric(
        "retries/<error>",
        "tries",
        "all",
        "New tries of steps after errors of this class: `engine_died`, `engine_timeout`, `engine`, `store`, `disk`, "
        "`grader`.",
        is_count=True,
    ),
    Metric(
        "recovery/replayed_steps",
        "steps",
        "all",
        "Committed train steps that were repeated to restore the trainer, before this step or within it.",
        is_count=True,
    ),
    Metric(
        "perf/retry_wait_time",
        "s",
        "timings",
        "Waiting time before new tries of steps and samples, summed over shards.",
    ),
    Metric("perf/step_time", "s", "timings", "The iteration, from the start of its first step to the end of its last."),
    Metric("perf/rollout_time", "s", "timings", "From the first rollout's start to the last filter's commit."),
    Metric("perf/log_probs_time", "s", "timings", "`score`."),
    Metric("perf/actor_train_time", "s", "timings", "`train`."),
    Metric(
        "perf/save_model_time",
        "s",
        "timings",
        "`checkpoint`, until the state is copied: it is written while the run goes on.",
    ),
    Metric(
        "perf/update_stall_time",
        "s",
        "timings",
        "In the `streaming` pipeline: time in which rollout engines decoded nothing because their weights were "
        "replaced during generation, summed over engines, since the previous iteration.",
    ),
    Metric("perf/update_weights_time", "s", "timings", "`sync`."),
    Metric("perf/eval_time", "s", "timings", "`eval`."),
    Metric(
        "perf/snapshot_bytes", "bytes", "outputs", "Committed files of the iteration, without those of its checkpoint."
    ),
    Metric("perf/checkpoint_bytes", "bytes", "outputs", "Files of its checkpoint."),
    Metric(
        "perf/other_time",
        "s",
        "timings",
        "Part of `perf/step_time` in which no step was at work: the cost of orchestration.",
    ),
    Metric(
        "perf/train_wait_time",
        "s",
        "waits",
        "Time in which the trainer did not work, between the end of the previous iteration's learning (its last "
        "`train`, `checkpoint` or `sync`) and the end of this iteration's.",
    ),
    Metric("perf/wait_time_ratio", "fraction", "waits", "The same as a share of the time between these ends."),
    Metric(
        "perf/rollout_wait_time",
        "s",
        "waits",
        "Time in which a rollout engine neither generated nor evaluated, averaged over engines, between the end of "
        "the previous iteration's collecting (its last `filter`) and the end of this iteration's.",
    ),
    Metric("perf/rollout_wait_time_ratio", "fraction", "waits", "The same as a share of the time between these ends."),
    Metric(
        "perf/tokens_per_gpu_per_sec",
        "tokens/s",
        "timings",
        "Generated tokens per second of `perf/rollout_time`, per rollout GPU; per rollout engine if there is no GPU.",
    ),
    Metric(
        "perf/cache_hit_rate",
        "fraction",
        "rollout",
        "`rollout/cached_tokens` / `rollout/prompt_tokens`, for engines with a prefix cache.",
    ),
    Metric(
        "perf/actor_train_tok_per_s", "tokens/s", "timings", "Trained tokens per second of `perf/actor_train_time`."
    ),
    Metric(
        "perf/actor_train_tflops",
        "TFLOP/s",
        "timings",
        "`train/flops` per second that the trainer computed, per rank: without restores, waits and commits.",
    ),
    Metric(
        "perf/mfu",
        "fraction",
        "timings",
        "Model FLOPs utilization: `perf/actor_train_tflops` divided by the peak of the device, which is "
        "`tracking.peak_tflops` or known for the GPU (`engines/plan/peaks.py`); none on CPUs without that option.",
    ),
)

_OWN_PREFIX = ("age/", "retries/", "recovery/")
_OF_SAMPLES = ("raw_reward", "truncated_ratio", "response_len/")
"""Metrics that are computed over all generated samples in the filter step's commit, and over trained samples in the
advantage step's."""
_PREFIX = {Step.TRAIN: "train/", Step.EVAL: "eval/"}
_TIMES = {
    "perf/log_probs_time": Step.SCORE,
    "perf/actor_train_time": Step.TRAIN,
    "perf/save_model_time": Step.CHECKPOINT,
    "perf/update_weights_time": Step.SYNC,
    "perf/eval_time": Step.EVAL,
}
_ROLLOUT = (Step.ROLLOUT, Step.REWARD, Step.FILTER)
_READERS = 4
"""Number of iterations whose commits are read concurrently."""


@functools.cache
def find_metric(name: str) -> Metric | None:
    """Return the entry of `METRICS` that documents `name`; a literal name takes precedence over a family."""
    fitting = [metric for metric in METRICS if metric.matches(name)]
    return min(fitting, key=lambda metric: (metric.name.count("<"), -len(metric.name)), default=None)


def shown_metrics(commit: Commit) -> dict[str, float]:
    """Return the metrics of one commit under the names in `METRICS`."""
    return {_shown_name(commit.step, name): value for name, value in commit.metrics.items()}


def _shown_name(step: Step, name: str) -> str:
    if name.startswith(_OWN_PREFIX):
        return name
    if step is Step.ADVANTAGE and name.startswith(_OF_SAMPLES):
        return f"rollout/trained/{name}"
    prefix = _PREFIX.get(step, "rollout/")
    return prefix + name.removeprefix(prefix)


def iteration_metrics(commits: Iterable[Commit], config: RunConfig) -> dict[str, float]:
    """Return all metrics of one iteration except its evaluations. The commits may be in any order."""
    commits = sorted(commits, key=lambda commit: (commit.committed_at, commit.name))
    metrics: dict[str, float] = {}
    for commit in commits:
        if commit.step is not Step.EVAL:
            for name, value in shown_metrics(commit).items():
                metric = find_metric(name)
                if metric is not None and metric.is_count:
                    value += metrics.get(name, 0.0)
                elif metric is not None and metric.is_maximum:
                    value = max(value, metrics.get(name, value))
                metrics[name] = value
    return metrics | _of_episodes(metrics) | _performance(commits, metrics, config)


def retries(commit: Commit) -> dict[str, int]:
    """Return the number of new tries of a step by the class of the error."""
    tries = commit.metrics.items()
    return {name.removeprefix("retries/"): int(count) for name, count in tries if name.startswith("retries/")}


def retry_seconds(commits: Iterable[Commit]) -> float:
    """Return the seconds of waits before new tries of steps and of samples, summed over shards."""
    return sum(commit.timings.get(name, 0.0) for commit in commits for name in ("retry_wait", "grader_wait"))


def mean_reward(metrics: Mapping[str, float]) -> float | None:
    """Return the mean reward of the samples that an iteration generated, or of the trained ones where only that is
    known. `metrics`: see `iteration_metrics`."""
    return metrics.get("rollout/raw_reward", metrics.get("rollout/trained/raw_reward"))


def in_short(metrics: Mapping[str, float]) -> str:
    """Return an iteration in a few words: `reward 0.523, 12.4 tokens a response, 1.0 s`. `metrics`: see
    `iteration_metrics`."""
    reward, length = mean_reward(metrics), metrics.get("rollout/response_len/mean")
    parts = [] if reward is None else [f"reward {reward:.3f}"]
    if reward is None and "train/loss" in metrics:
        parts.append(f"loss {metrics['train/loss']:.3f}")
    if length is not None:
        parts.append(f"{length:,.1f} tokens a response")
    return ", ".join([*parts, duration(metrics["perf/step_time"])])


def eval_metrics(commits: Iterable[Commit]) -> dict[int, dict[str, float]]:
    """Return the metrics of evaluations, by the number of iterations that the evaluated weights were trained for."""
    points: dict[int, dict[str, float]] = {}
    for commit in commits:
        if commit.step is Step.EVAL:
            trained = commit.iteration + 1 if commit.weight_version_in else 0
            points.setdefault(trained, {}).update(shown_metrics(commit))
    return points


def read_iterations(ledger: Ledger, iterations: Iterable[int]) -> Iterator[list[Commit]]:
    """Yield the commits of each iteration. Reads several iterations at a time. Raises Damaged."""
    with ThreadPoolExecutor(_READERS) as readers:
        yield from readers.map(ledger.commits, iterations)


def step_seconds(commits: Iterable[Commit]) -> dict[Step, float]:
    """Return the seconds in which at least one shard of a step was running, by step."""
    commits = list(commits)
    return {
        step: busy for step in Step if (busy := busy_seconds(commit for commit in commits if commit.step is step)) > 0
    }


def busy_seconds(commits: Iterable[Commit]) -> float:
    """Return the seconds covered by at least one of the commits."""
    return covered_seconds((commit.started_at, busy_until(commit)) for commit in commits)


def busy_until(commit: Commit) -> float:
    """Return when a step let the next one begin: when it was committed, or when it had copied what it then wrote while
    others worked."""
    return commit.started_at + commit.timings["copy"] if "copy" in commit.timings else commit.committed_at


def covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the seconds covered by at least one of the intervals, each from its start to its end."""
    busy, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy


def spell_score(score: float | None, failed: float | None, graded: float | None) -> str:
    """Return a benchmark's score and, where samples failed, that of the others: `0.250 (6 failed; 1.000 without
    them)`."""
    spelled = "–" if score is None else f"{score:.3f}"
    return spelled + (f" ({failed:.0f} failed; {graded:.3f} without them)" if failed and graded is not None else "")


def _of_episodes(metrics: dict[str, float]) -> dict[str, float]:
    """Return ratios of counts that shards report."""
    ratios = {
        "rollout/policy_calls/mean": ("rollout/policy_calls", "rollout/samples"),
        "rollout/world_tokens_ratio": ("rollout/world_tokens", "rollout/response_tokens"),
        "rollout/retold_ratio": ("rollout/retold_tokens", "rollout/sampled_tokens"),
    }
    return {
        name: metrics[part] / metrics[whole]
        for name, (part, whole) in ratios.items()
        if part in metrics and metrics.get(whole)
    }


def _performance(commits: Sequence[Commit], metrics: dict[str, float], config: RunConfig) -> dict[str, float]:
    seconds = step_seconds(commits)
    performance = {name: seconds[step] for name, step in _TIMES.items() if step in seconds}
    waits = retry_seconds(commits)
    if waits:
        performance["perf/retry_wait_time"] = waits
    stalls = [commit.timings["update_stall"] for commit in commits if "update_stall" in commit.timings]
    if stalls:
        performance["perf/update_stall_time"] = sum(stalls)
    whole = _span(commits)
    performance["perf/step_time"] = whole
    performance["perf/other_time"] = max(0.0, whole - busy_seconds(commits))
    saved = _bytes(commit for commit in commits if commit.step is Step.CHECKPOINT)
    performance["perf/snapshot_bytes"] = _bytes(commits) - saved
    if Step.CHECKPOINT in seconds:
        performance["perf/checkpoint_bytes"] = saved
    rollout_time = _span([commit for commit in commits if commit.step in _ROLLOUT])
    performance["perf/rollout_time"] = rollout_time
    gpus = config.rollout.num_engines * (config.rollout.num_gpus_per_engine or 1)
    streamed = sum(commit.timings.get("engines", 0.0) for commit in commits) / config.rollout.num_engines
    if (streamed or rollout_time) > 0 and "rollout/response_tokens" in metrics:
        performance["perf/tokens_per_gpu_per_sec"] = (
            metrics["rollout/response_tokens"] / (streamed or rollout_time) / gpus
        )
    if kind_of(config.rollout.engine).caches_prefixes and metrics.get("rollout/prompt_tokens"):
        performance["perf/cache_hit_rate"] = metrics["rollout/cached_tokens"] / metrics["rollout/prompt_tokens"]
    if seconds.get(Step.TRAIN) and "train/tokens" in metrics:
        performance["perf/actor_train_tok_per_s"] = metrics["train/tokens"] / seconds[Step.TRAIN]
    return performance | _utilization(commits, config)


def _utilization(commits: Iterable[Commit], config: RunConfig) -> dict[str, float]:
    """Return the utilization of the training devices during weight updates."""
    trained = next((commit for commit in commits if commit.step is Step.TRAIN and "flops" in commit.metrics), None)
    if trained is None or not trained.timings.get("update"):
        return {}
    tflops = trained.metrics["flops"] / trained.timings["update"] / config.training.world_size / 1e12
    peak = config.tracking.peak_tflops or peak_tflops(trained.environment.device, config.training.dtype)
    return {"perf/actor_train_tflops": tflops, **({} if peak is None else {"perf/mfu": tflops / peak})}


def _bytes(commits: Iterable[Commit]) -> int:
    return sum(output.bytes for commit in commits for output in commit.outputs)


def _span(commits: Sequence[Commit]) -> float:
    """Return the seconds from the first start to the last commit, without the time between two drivers."""
    spans = 0.0
    for epoch in {commit.epoch for commit in commits}:
        own = [commit for commit in commits if commit.epoch == epoch]
        spans += max(map(busy_until, own)) - min(commit.started_at for commit in own)
    return spans
