"""Alarms for a policy that collapses: pure functions of the metrics of an iteration and of earlier ones, and the
watcher that sends them.

For every iteration, each alarm is raised or not, if its rule has enough values. It is sent when it is raised and was
not raised in the iteration before: to the terminal, and as the event `cairn.alarm.<name>` to Prefect, whose automations
can notify a person.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean

from cairn.configs.schema.operations import AlarmRule, AlarmsConfig
from cairn.configs.schema.run import RunConfig
from cairn.flows.events import Event, IterationDone
from cairn.flows.reading.balance import iteration_waits
from cairn.flows.reading.metrics import iteration_metrics
from cairn.storage.ledger.commits import Commit
from cairn.storage.ledger.ledger import Ledger
from cairn.tasks.durable.events import Message

WATCHED: Mapping[str, tuple[str, ...]] = {
    "entropy": ("train/entropy_loss",),
    "response_length": ("rollout/response_len/mean", "rollout/trained/response_len/mean"),
    "kl": ("train/kl_loss", "rollout/kl", "train/ppo_kl"),
    "reward": ("rollout/raw_reward", "rollout/trained/raw_reward"),
}
"""Metrics of each alarm: the first of them that an iteration has is used."""


def raised(values: Sequence[float], rule: AlarmRule, window: int) -> str | None:
    """Return why the rule raises an alarm at the last of the values, oldest first; None if it does not, also for too
    few values."""
    if len(values) < window:
        return None
    mean = fmean(values[-window:])
    if rule.below is not None and mean < rule.below:
        return f"{mean:.4g} is below {rule.below:g}"
    if rule.above is not None and mean > rule.above:
        return f"{mean:.4g} is above {rule.above:g}"
    if len(values) < 2 * window:
        return None
    before = fmean(values[-2 * window : -window])
    change = mean - before
    if rule.fall is not None and -change > rule.fall * abs(before):
        return f"{mean:.4g} has fallen from {before:.4g}"
    if rule.rise is not None and change > rule.rise * abs(before):
        return f"{mean:.4g} has risen from {before:.4g}"
    return None


def alarms(metrics: Sequence[Mapping[str, float]], config: AlarmsConfig) -> dict[str, str | None]:
    """Return for each alarm with a rule and a metric why it is raised, or None. `metrics` are those of consecutive
    iterations; the last one is judged."""
    judged: dict[str, str | None] = {}
    for name, watched in WATCHED.items():
        rule: AlarmRule = getattr(config, name)
        metric = next((one for one in watched if metrics and one in metrics[-1]), None)
        if rule.is_set and metric is not None:
            judged[name] = raised([one[metric] for one in metrics if metric in one], rule, config.window)
    return judged


class MetricHistory:
    """The metrics of iterations with the alarms, which depend on earlier iterations. Used by one thread."""

    def __init__(self, ledger: Ledger, config: RunConfig) -> None:
        self._ledger, self._config = ledger, config
        rules = config.tracking.alarms
        self.has_rules = any(getattr(rules, name).is_set for name in WATCHED)
        self._reach = 2 * rules.window if self.has_rules else 1
        """Number of iterations that an alarm depends on."""
        self._known: dict[int, dict[str, float]] = {}
        self._commits: dict[int, Sequence[Commit]] = {}
        """Commits of the iterations from which waits are computed."""

    def metrics(self, iteration: int, commits: Sequence[Commit]) -> dict[str, float]:
        """Return all metrics of a complete iteration except its evaluations."""
        sounding = self.alarms(iteration, commits)
        return (
            self._known[iteration]
            | self._waits(iteration, commits)
            | {f"alarm/{name}": float(why is not None) for name, why in sounding.items()}
        )

    def alarms(self, iteration: int, commits: Sequence[Commit]) -> dict[str, str | None]:
        """Return the alarms of an iteration, see `alarms`."""
        self._known[iteration] = self._metrics(commits)
        first = max(0, iteration - self._reach + 1)
        for earlier in range(first, iteration):
            if earlier not in self._known:
                self._known[earlier] = self._metrics(self._ledger.commits(earlier))
        self._known = {one: known for one, known in self._known.items() if one >= first}
        return alarms([self._known[one] for one in range(first, iteration + 1)], self._config.tracking.alarms)

    def _metrics(self, commits: Sequence[Commit]) -> dict[str, float]:
        return iteration_metrics(commits, self._ledger.config_of(*commits) if commits else self._config)

    def _waits(self, iteration: int, commits: Sequence[Commit]) -> dict[str, float]:
        before = range(max(0, iteration - 1 - self._config.rollout.weights_lag), iteration)
        known = {one: self._commits.get(one) or self._ledger.commits(one) for one in before}
        self._commits = {**known, iteration: commits}
        earlier = [commit for one in before for commit in known[one]]
        return iteration_waits(commits, earlier, self._ledger.config_of(*commits))


class Alarms:
    """The watcher that sends alarms."""

    def __init__(self, ledger: Ledger, config: RunConfig, emit: Callable[[Message], None]) -> None:
        self._ledger, self._emit = ledger, emit
        self._history = MetricHistory(ledger, config)
        self._sounding: set[str] | None = None
        """Raised alarms of the newest complete iteration; None before there is one."""

    def __call__(self, event: Event) -> None:
        if not isinstance(event, IterationDone) or not self._history.has_rules:
            return
        if self._sounding is None and event.iteration:
            before = self._history.alarms(event.iteration - 1, self._ledger.commits(event.iteration - 1))
            self._sounding = {name for name, why in before.items() if why}
        alarms = self._history.alarms(event.iteration, event.commits)
        for name, why in alarms.items():
            if why is not None and name not in (self._sounding or ()):
                self._sound(event.iteration, name, why)
        self._sounding = {name for name, why in alarms.items() if why}

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def stop(self) -> None:
        """Do nothing: no resource is held."""

    def _sound(self, iteration: int, name: str, why: str) -> None:
        self._emit(Message(f"Alarm in iteration {iteration}: {name.replace('_', ' ')} {why}", "warning"))
        with suppress(Exception):  # a server that does not respond is reported elsewhere
            emit_alarm(self._ledger.run, name, {"iteration": iteration, "why": why})


def emit_alarm(run: str, name: str, payload: dict[str, object]) -> None:
    """Send the event of an alarm to the Prefect server of the current context."""
    from prefect.events import emit_event

    resource = {"prefect.resource.id": f"cairn.run.{run}", "prefect.resource.name": run}
    emit_event(event=f"cairn.alarm.{name}", resource=resource, payload=payload)
