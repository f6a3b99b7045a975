"""The metrics of an iteration: a view of its commits. `docs/metrics.md` is generated from `metrics.toml`.

A step writes its metrics into its commit. They are shown with the step's prefix (`train/`, `eval/`, otherwise
`rollout/`; `age/` is a prefix of its own), under slime's names where slime has the metric. Everything under `perf/` is
computed here, from start and commit times of steps and from the sizes of their files.
"""

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

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
    shards: str = "last"
    """What counts of the values of shards: the `last` commit's, their `sum` or their `max`."""

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric or belongs to this family."""
        pattern = "[^/]+".join(re.escape(part) for part in re.split(r"<\w+>", self.name))
        return re.fullmatch(pattern, name) is not None


METRICS = tuple(
    Metric(name, *entry)
    for name, entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
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
                if metric is not None and metric.shards == "sum":
                    value += metrics.get(name, 0.0)
                elif metric is not None and metric.shards == "max":
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
