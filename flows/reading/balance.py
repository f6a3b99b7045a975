"""Balance of a run: the shares of wall time in which its two sides work or wait, from the times in the ledger.

| side | works in |
|---|---|
| rollout engines | `rollout`, `eval`; each engine in its own shards |
| trainer | `score`, `train`, `checkpoint`, `sync` |

A side waits when it does not work. With a lag of k the engines work on iterations at most k after the one that is
trained on. The window reaches from the end of one iteration's learning to the end of another's. All work within it is
known once k more iterations are complete; work is cut to the window. Time without a live driver does not count.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from itertools import chain
from statistics import fmean

from cairn.configs.schema.run import RunConfig
from cairn.flows.reading.costs import ON_TRAINING, devices, engine_of
from cairn.flows.reading.metrics import busy_until, covered_seconds, read_iterations
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.records import Record

WINDOW = 10
"""Number of iterations that are measured at most."""
LEAST = 3
"""Number of iterations that are measured at least: fewer are not conclusive."""
NOTABLE = 0.1
"""Share of the time below which a wait does not matter."""
_ON_ROLLOUT = frozenset({Step.ROLLOUT, Step.EVAL})
_COLLECTING = frozenset({Step.ROLLOUT, Step.REWARD, Step.FILTER, Step.EVAL})
"""Steps that `lagged` runs concurrently with the learning of an earlier iteration; evaluations use the same engines."""

Interval = tuple[float, float]
"""Start and end, Unix seconds."""


class Bottleneck(StrEnum):
    """The part that works for most of the time, and so limits the speed of a run."""

    ROLLOUT = "rollout"
    TRAINER = "trainer"
    GRADERS = "graders"
    DRIVER = "driver"
    """Steps without a device, and orchestration overhead."""


HINTS = {
    Bottleneck.ROLLOUT: ("rollout.num_engines", "rollout.max_running_requests", "rollout.partial_rollout"),
    Bottleneck.TRAINER: ("training.world_size", "training.max_tokens_per_gpu", "checkpoint.save_interval"),
    Bottleneck.GRADERS: ("reward.num_workers",),
    Bottleneck.DRIVER: (),
}
"""Options on which the speed of a part depends, those with the greatest effect first."""
_NAMES = {
    Bottleneck.ROLLOUT: "rollout is",
    Bottleneck.TRAINER: "training is",
    Bottleneck.GRADERS: "the graders are",
    Bottleneck.DRIVER: "the driver's work between their steps is",
}


class Balance(Record):
    """Shares of the wall time of some iterations, from 0 to 1."""

    first: int
    """First iteration of the window."""
    last: int
    seconds: float
    """Seconds of the window in which a driver was alive."""
    rollout_wait: float
    """Share of time in which a rollout engine waits, averaged over engines."""
    trainer_wait: float
    neither: float
    """Share of time in which neither side works: graders, steps without a device, orchestration. In a streaming run
    this is a lower bound: only the amount of the engines' working time is known, not when they worked."""
    engines_apart: float
    """Share of time in which some rollout engines work and others have nothing left to do, averaged over engines."""
    steps: dict[Step, float]
    """Share of time in which at least one shard of a step is running, by step."""
    bottleneck: Bottleneck
    overlap: float
    """Upper bound of the speedup from overlapping the halves of iterations, collecting and learning: the sum of the
    halves divided by the larger one. 1 where they already overlap."""
    rounds: float
    """Mean number of rollout rounds of an iteration."""
    groups: float
    """Mean number of generated groups of an iteration."""
    queued: float
    """Largest number of requests that waited in an engine's queue."""

    @property
    def is_even(self) -> bool:
        """Whether neither side waits for a notable share of the time."""
        return max(self.rollout_wait, self.trainer_wait) < NOTABLE

    @property
    def hints(self) -> tuple[str, ...]:
        """Options on which the bottleneck depends; none where neither side waits."""
        return () if self.is_even else HINTS[self.bottleneck]

    def sentence(self, config: RunConfig) -> str:
        """Return `the trainer waits 41 % of the time, the rollout engines 3 %: rollout is the bottleneck; …`."""
        waits = f"the trainer waits {_percent(self.trainer_wait)} of the time, the rollout engines "
        waits += _percent(self.rollout_wait)
        if self.is_even:
            return f"{waits}: balanced"
        waits += f": {_NAMES[self.bottleneck]} the bottleneck"
        if self.bottleneck is Bottleneck.DRIVER:
            waits += f", neither side works {_percent(self.neither)} of the time"
        if config.fleet.colocate or config.fleet.offloads_train or config.fleet.offloads_rollout:
            waits += "; sides that share GPUs (fleet.colocate, fleet.offload_train, fleet.offload_rollout) take turns"
        elif not config.rollout.weights_lag:
            waits += "; with rollout.pipeline sync each side waits while the other works, lagged overlaps them: "
            waits += f"iterations {self.overlap:.2f} times as fast at best"
        return waits + (f"; see {', '.join(self.hints)}" if self.hints else "")


def iteration_waits(commits: Sequence[Commit], earlier: Sequence[Commit], config: RunConfig) -> dict[str, float]:
    """Return the metrics of an iteration on the waits of each side; none for the first iteration, which has no
    predecessor, and where nothing is sampled. `earlier`: the commits of the 1 + `weights_lag` iterations before."""
    if not earlier or not config.samples_responses:
        return {}
    this, everything = commits[0].iteration, [*earlier, *commits]

    def window(steps: Collection[Step]) -> "_Window":
        return _Window(everything, _end(everything, this - 1, steps), _end(everything, this, steps))

    learning, collecting = window(ON_TRAINING), window({Step.FILTER})
    waits = {
        "train_wait_time": ("wait_time_ratio", learning, learning.seconds - learning.busy(ON_TRAINING)),
        "rollout_wait_time": (
            "rollout_wait_time_ratio", collecting, collecting.seconds - fmean(collecting.engines(config))
        ),
    }  # fmt: skip
    times = {f"perf/{name}": waited for name, (_, _, waited) in waits.items()}
    return times | {f"perf/{name}": waited / of.seconds for name, of, waited in waits.values() if of.seconds > 0}


def measured(
    ledger: Ledger,
    config: RunConfig,
    complete: int,
    read: Callable[[Ledger, Iterable[int]], Iterable[list[Commit]]] = read_iterations,
) -> Balance | None:
    """Return the balance of the newest iterations of a run with `complete` complete iterations. Returns None where
    nothing is sampled, and where too few are left after the first ones, which warm up and fill the pipeline, and those
    with another number of devices.

    Reads the commits of `WINDOW` + 1 + 2 × lag iterations at most, by `read`. Raises Damaged.
    """
    lag = config.rollout.weights_lag
    last = complete - 1 - lag
    first = max(ledger.first_iteration + 1 + lag, last - WINDOW + 1)
    if last - first + 1 < LEAST or not config.samples_responses:
        return None
    commits = list(chain.from_iterable(read(ledger, range(first - 1 - lag, complete))))
    others = {one.iteration for one in commits if devices(ledger.config_of(one)) != devices(config)}
    first = max(first, max(others, default=-1) + 2 + lag)
    if last - first + 1 < LEAST:
        return None
    window = _Window(commits, _end(commits, first - 1, ON_TRAINING), _end(commits, last, ON_TRAINING))
    if window.seconds <= 0:
        return None
    own = [commit for commit in commits if first <= commit.iteration <= last]
    return _balance(window, own, config, first, last)


def _balance(window: "_Window", own: Sequence[Commit], config: RunConfig, first: int, last: int) -> Balance:
    """`own`: the commits of the iterations from `first` to `last`."""

    def share(steps: Collection[Step]) -> float:
        return window.busy(steps) / window.seconds

    engines, trainer = fmean(window.engines(config)) / window.seconds, share(ON_TRAINING)
    streams = config.rollout.pipeline == "streaming"  # its rollout steps only wait
    rollout = engines if streams else share(_ON_ROLLOUT)
    working = {
        Bottleneck.ROLLOUT: rollout,
        Bottleneck.TRAINER: trainer,
        Bottleneck.GRADERS: share({Step.REWARD}),
        Bottleneck.DRIVER: 0.0 if streams else 1 - share({*_ON_ROLLOUT, *ON_TRAINING, Step.REWARD}),
    }
    collecting, learning = share(_COLLECTING), share({*ON_TRAINING, Step.ADVANTAGE})
    larger = max(collecting, learning)
    generated = [commit for commit in own if commit.step is Step.ROLLOUT]
    return Balance(
        first=first,
        last=last,
        seconds=window.seconds,
        rollout_wait=1 - engines,
        trainer_wait=1 - trainer,
        neither=max(0.0, 1 - rollout - trainer) if streams else 1 - share({*_ON_ROLLOUT, *ON_TRAINING}),
        engines_apart=rollout - engines,
        steps={step: busy for step in Step if (busy := share({step})) > 0},
        bottleneck=max(working, key=lambda side: working[side]),
        overlap=1.0 if config.rollout.weights_lag or not larger else (collecting + learning) / larger,
        rounds=sum(commit.step is Step.FILTER for commit in own) / (last - first + 1),
        groups=sum(commit.metrics.get("generated_groups", 0.0) for commit in generated) / (last - first + 1),
        queued=max(
            (n for c in generated for name, n in c.metrics.items() if name.endswith("/queued_requests_max")), default=0
        ),
    )


def _end(commits: Iterable[Commit], iteration: int, steps: Collection[Step]) -> float:
    """Return when the last of these steps of an iteration ended."""
    return max(busy_until(commit) for commit in commits if commit.iteration == iteration and commit.step in steps)


class _Window:
    """The commits' work between two times."""

    def __init__(self, commits: Iterable[Commit], start: float, end: float) -> None:
        self._start, self._end = start, end
        self._commits = [commit for commit in commits if "found" not in commit.values]  # an evaluation that ran nowhere
        drivers: dict[tuple[str, int], list[Commit]] = {}
        for commit in self._commits:
            drivers.setdefault((commit.run, commit.epoch), []).append(commit)
        self.seconds = covered_seconds(
            self._cut(
                (min(commit.started_at for commit in own), max(commit.committed_at for commit in own))
                for own in drivers.values()
            )
        )
        """Seconds in which a driver was alive."""

    def busy(self, steps: Collection[Step]) -> float:
        """Return the seconds in which at least one of the steps was running."""
        return self._covered(commit for commit in self._commits if commit.step in steps)

    def engines(self, config: RunConfig) -> list[float]:
        """Return the seconds in which each rollout engine was working; in a streaming run all have the mean."""
        shared = [commit for commit in self._commits if commit.step is Step.EVAL]
        own: list[list[Commit]] = [[] for _ in range(config.rollout.num_engines)]
        for commit in self._commits:
            if commit.step is Step.ROLLOUT and "engines" not in commit.timings:
                own[engine_of(commit, config)].append(commit)
        counted = [c for c in self._commits if "engines" in c.timings and self._start < c.committed_at <= self._end]
        served = config.rollout.num_engines
        streamed = sum(commit.timings["engines"] / commit.metrics.get("engines", served) for commit in counted)
        return [min(self.seconds, self._covered([*shared, *commits]) + streamed) for commits in own]

    def _covered(self, commits: Iterable[Commit]) -> float:
        return covered_seconds(self._cut((commit.started_at, busy_until(commit)) for commit in commits))

    def _cut(self, intervals: Iterable[Interval]) -> list[Interval]:
        cut = ((max(start, self._start), min(end, self._end)) for start, end in intervals)
        return [(start, end) for start, end in cut if start < end]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
