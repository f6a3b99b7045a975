"""Prometheus metrics of a run while its driver is running: `GET /metrics` on `tracking.prometheus_port`.

Every family has the label `run`. docs/grafana.json is a dashboard over them.
"""

from collections.abc import Mapping
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from cairn.configs.errors import ConfigError
from cairn.configs.schema.run import RunConfig
from cairn.flows.events import Event, IterationDone, RunStarted
from cairn.flows.reading.metrics import eval_metrics, mean_reward, retries, step_seconds
from cairn.flows.reading.samples import first_and_last_scores
from cairn.flows.watching.alarms import MetricHistory
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.tasks.durable.events import StepCommitted, StepStarted

_GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "cairn_iteration": ("The newest iteration that is complete.", ()),
    "cairn_iterations": ("Iterations that the run has in total.", ()),
    "cairn_reward": ("Mean reward of all samples that the iteration generated.", ()),
    "cairn_metric": ("Every metric of docs/metrics.md, of the newest complete iteration.", ("name",)),
    "cairn_score": ("Newest score of a benchmark.", ("benchmark",)),
    "cairn_step_seconds": ("Seconds of the newest complete iteration in which a step was at work.", ("step",)),
    "cairn_working": ("Shards of a step that are at work now.", ("step",)),
    "cairn_alarm": ("1 while the alarm is raised, else 0.", ("alarm",)),
    "cairn_last_commit_timestamp_seconds": ("When the newest commit was made, in Unix seconds.", ()),
}
_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "cairn_commits": ("Commits that this driver made.", ("step",)),
    "cairn_generated_tokens": ("Tokens generated in training, under this driver.", ()),
    "cairn_trained_tokens": ("Tokens trained on, under this driver.", ()),
    "cairn_retries": ("New tries of steps, by the class of the error, under this driver.", ("error",)),
}
FAMILIES = frozenset({*_GAUGES, *(f"{name}_total" for name in _COUNTERS)})
"""Names of all exported families."""


class Prometheus:
    """The watcher that responds to Prometheus. Raises ConfigError if the port is not free."""

    def __init__(self, ledger: Ledger, config: RunConfig, host: str, port: int) -> None:
        self._ledger, self._config = ledger, config
        self._history = MetricHistory(ledger, config)
        self._working: set[tuple[int, Step, str | None]] = set()
        registry = CollectorRegistry()
        self._gauges = {
            name: Gauge(name, about, ("run", *labels), registry=registry) for name, (about, labels) in _GAUGES.items()
        }
        self._counters = {
            name: Counter(name, about, ("run", *labels), registry=registry)
            for name, (about, labels) in _COUNTERS.items()
        }
        self._server: WSGIServer
        self._thread: Thread
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                [f"tracking.prometheus_port is {port}, which is not usable ({error}); choose another, or null"]
            ) from None
        self.port: int = self._server.server_port

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._set("cairn_iterations", event.iterations)
                if event.iteration:
                    commits = tuple(self._ledger.commits(event.iteration - 1))
                    self._show(IterationDone(event.iteration - 1, commits))
                    self._show_scores(event.iteration - 1)
            case StepStarted():
                self._working.add((event.iteration, event.step, event.shard))
                self._show_working()
            case StepCommitted():
                self._working.discard((event.commit.iteration, event.commit.step, event.commit.shard))
                self._show_working()
                if not event.adopted:
                    self._count("cairn_commits", 1, event.commit.step)
                    self._set("cairn_last_commit_timestamp_seconds", event.commit.committed_at)
            case IterationDone():
                self._working = {place for place in self._working if place[0] > event.iteration}
                self._show_working()
                self._show(event)
                self._add(event)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def stop(self) -> None:
        self.close()

    def _show_working(self) -> None:
        for step in Step:
            self._set("cairn_working", sum(place[1] is step for place in self._working), step)

    def _show(self, done: IterationDone) -> None:
        """Set the gauges of an iteration."""
        metrics = self._history.metrics(done.iteration, done.commits)
        self._set("cairn_last_commit_timestamp_seconds", max(commit.committed_at for commit in done.commits))
        reward = mean_reward(metrics)
        if reward is not None:
            self._set("cairn_reward", reward)
        for name, value in metrics.items():
            self._set("cairn_metric", value, name)
            if name.startswith("alarm/"):
                self._set("cairn_alarm", value, name.removeprefix("alarm/"))
        seconds = step_seconds(done.commits)
        for step in Step:
            self._set("cairn_step_seconds", seconds.get(step, 0.0), step)
        for _, scores in sorted(eval_metrics(done.commits).items()):
            for benchmark in self._config.eval.benchmarks:
                if f"eval/{benchmark.name}" in scores:
                    self._set("cairn_score", scores[f"eval/{benchmark.name}"], benchmark.name)
        # Last, so that a concurrent reader finds all values of the iteration that is named.
        self._set("cairn_iteration", done.iteration)

    def _show_scores(self, last: int) -> None:
        """Set the newest scores up to an iteration, which may be much older than it."""
        for benchmark, scores in first_and_last_scores(self._ledger, self._config, last).items():
            if scores.last is not None:
                self._set("cairn_score", scores.last, benchmark)

    def _add(self, done: IterationDone) -> None:
        """Increase the counters by the values of an iteration."""
        for commit in done.commits:
            if commit.step is Step.ROLLOUT:
                self._count("cairn_generated_tokens", commit.metrics.get("response_tokens", 0))
            if commit.step is Step.TRAIN:
                self._count("cairn_trained_tokens", commit.metrics.get("tokens", 0))
            for error, count in retries(commit).items():
                self._count("cairn_retries", count, error)

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._gauges[name].labels(self._ledger.run, *labels).set(value)

    def _count(self, name: str, amount: float, *labels: str) -> None:
        self._counters[name].labels(self._ledger.run, *labels).inc(amount)
