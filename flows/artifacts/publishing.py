"""The watcher that keeps a run's pages in Prefect's interface.

| what happens | what becomes of the pages |
|---|---|
| an iteration is done | its page is made, once, for the iteration's flow run; the run's page is replaced |
| a driver begins | the pages that earlier drivers did not come to are made first: the newest CATCH_UP at most |
| Prefect, or the store, does not answer | one warning; what is owed is made when it answers again |
| another driver has the run | nothing more is made |
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID

import httpx
from prefect.exceptions import PrefectException

from cairn.flows.artifacts.board import Board, current_flow_run_id, run_key
from cairn.flows.artifacts.pages import IterationFacts, RunFacts, iteration_page, run_page
from cairn.flows.artifacts.progress import IterationProgress, ProgressBar
from cairn.flows.artifacts.samples import Picked, picked_samples
from cairn.flows.costs.costs import StepCost, step_costs
from cairn.flows.events import (
    Event,
    GroupsGenerated,
    IterationDone,
    Message,
    RunDone,
    RunStarted,
    StepCommitted,
    StepStarted,
)
from cairn.flows.reading.metrics import eval_metrics, iteration_metrics, step_seconds
from cairn.flows.reading.scores import benchmark_scores, generated_reward
from cairn.storage.commits import Commit, Step
from cairn.storage.errors import Damaged, Retired, StoreError
from cairn.tasks.context import RunContext
from cairn.tasks.versions import version_of

CATCH_UP = 100
"""Pages of earlier iterations that a driver makes."""
POINTS = 400
"""Of the reward curve, that are read from the ledger when a driver begins."""
PAGE_INTERVAL = 5.0
"""Seconds between two updates of the run's page while iterations go by."""
ITERATION = "-iteration"

_MAY_PASS = (httpx.HTTPError, PrefectException, OSError, RuntimeError, StoreError)
"""What Prefect's client raises where the server does not answer or not rightly, and the store."""


class Pages:
    """See the module, and `cairn.flows.watching.watchers.Watcher`."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        key = run_key(run.ledger)
        self._board = Board(key)
        self._bar = ProgressBar(Board(key), self._warn)
        self._now = IterationProgress(-1)
        self._flow_runs: dict[int, UUID] = {}
        self._driver: UUID | None = None
        self._page: UUID | None = None
        self._page_made = float("-inf")
        self._owed: dict[int, Sequence[Commit] | None] = {}
        """Iterations whose pages are to be made, with their commits where they are known."""
        self._made: set[int] | None = None
        """Those that have theirs; None: to be asked."""
        self._rewards: dict[int, float] = {}
        self._scores: dict[str, dict[int, float]] = {}
        self._costs: dict[Step, StepCost] = {}
        self._done = 0
        self._newest: Commit | None = None
        self._warned = threading.Lock()

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._begin(event.iteration)
            case StepStarted() | GroupsGenerated() | StepCommitted():
                self._follow(event)
            case IterationDone():
                self._iteration_done(event.iteration, event.commits)
                self._publish(now=False)
            case RunDone():
                self._bar.show(100.0, f"Done: {self._done} iterations")
                self._publish(now=True)
                self._bar.end(finish=True)

    def close(self) -> None:
        self._board.close()

    def stop(self) -> None:
        self._bar.end(finish=False)
        with suppress(Exception):
            self._board.close()

    def _begin(self, first: int) -> None:
        """A driver goes on at iteration `first`."""
        ledger = self._run.ledger
        self._driver = current_flow_run_id()
        self._bar.begin(self._driver)
        self._done = first
        for index in range(0, first, -(-first // POINTS) or 1):
            trained = ledger.find(index, Step.ADVANTAGE)
            if trained is not None and (reward := generated_reward(ledger, trained)) is not None:
                self._rewards[index] = reward
        self._scores = benchmark_scores(ledger, self._run.config)
        self._newest = ledger.find(first - 1, Step.TRAIN) if first else None
        own = range(max(ledger.first_iteration, first - CATCH_UP), first)
        self._owed = dict.fromkeys(own)
        self._publish(now=True)

    def _follow(self, event: StepStarted | GroupsGenerated | StepCommitted) -> None:
        iteration = event.commit.iteration if isinstance(event, StepCommitted) else event.iteration
        flow_run = current_flow_run_id()
        if flow_run is not None:
            self._flow_runs[iteration] = flow_run
        if iteration > self._now.iteration:
            self._now = IterationProgress(iteration)
        elif iteration < self._now.iteration:
            return  # of the half that learns beside the newest one
        match event:
            case StepStarted():
                self._now.working[event.step, event.shard] = None
            case GroupsGenerated():
                self._now.groups[event.shard] = (event.groups, event.total)
            case StepCommitted():
                commit = event.commit
                self._now.working.pop((commit.step, commit.shard), None)
                if commit.step is Step.ROLLOUT and commit.shard in self._now.groups:
                    total = self._now.groups[commit.shard][1]
                    self._now.groups[commit.shard] = (total - int(commit.metrics.get("aborted_groups", 0)), total)
        self._bar.show(self._now.percent, str(self._now))

    def _iteration_done(self, index: int, commits: Sequence[Commit]) -> None:
        metrics = iteration_metrics(commits, self._run.config)
        reward = metrics.get("rollout/raw_reward", metrics.get("rollout/trained/raw_reward"))
        if reward is not None:
            self._rewards[index] = reward
        for trained, scores in eval_metrics(commits).items():
            for benchmark in self._run.config.eval.benchmarks:
                if f"eval/{benchmark.name}" in scores:
                    self._scores.setdefault(benchmark.name, {})[trained] = scores[f"eval/{benchmark.name}"]
        for cost in step_costs(commits, self._run.config):
            self._costs[cost.step] = _sum(self._costs.get(cost.step), cost)
        self._done = max(self._done, index + 1)
        self._newest = next((commit for commit in commits if commit.step is Step.TRAIN), self._newest)
        self._owed[index] = commits

    def _publish(self, *, now: bool) -> None:
        """Make what is owed, and replace the run's page if it is `now` to be or its time has come."""
        self._run.ledger.require_held()  # or the next driver has asked what is there, and makes it
        try:
            self._make_owed()
            if now or time.monotonic() - self._page_made >= PAGE_INTERVAL:
                self._show_run()
                self._page_made = time.monotonic()
        except _MAY_PASS as error:
            self._made = None  # what was sent may have come
            self._board.close()
            self._warn(error)

    def _make_owed(self) -> None:
        if self._made is None:
            self._made = set(map(_iteration_of, self._board.descriptions(ITERATION, 2 * CATCH_UP)))
        for index in sorted(self._owed):
            if index not in self._made:
                commits = self._owed[index] or self._run.ledger.commits(index)
                flow_run = self._flow_runs.get(index, self._driver)
                page = iteration_page(self._facts(index, commits))
                self._board.create(ITERATION, "markdown", page, _description(index), flow_run)
                self._made.add(index)
            del self._owed[index]
            self._flow_runs.pop(index, None)

    def _facts(self, index: int, commits: Sequence[Commit]) -> IterationFacts:
        run = self._run
        samples: list[Picked] | None
        try:
            samples = picked_samples(commits, run.read)
        except (Retired, Damaged, StoreError):
            samples = None
        return IterationFacts(
            run=run.ledger.run,
            store=run.ledger.store.url,
            iteration=index,
            total=run.config.rollout.num_rollout,
            commits=commits,
            metrics=iteration_metrics(commits, run.config),
            seconds=step_seconds(commits),
            samples=samples,
        )

    def _show_run(self) -> None:
        run, newest = self._run, self._newest
        facts = RunFacts(
            run=run.ledger.run,
            store=run.ledger.store.url,
            done=self._done,
            total=run.config.rollout.num_rollout,
            weight_version=version_of(newest),
            state_digest=None if newest is None else newest.state_digest,
            rewards=self._rewards,
            scores=self._scores,
            costs=[self._costs[step] for step in Step if step in self._costs],
        )
        page, description = run_page(facts), f"{self._done} of {facts.total} iterations"
        if self._page is None:
            self._page = self._board.create("", "markdown", page, description, self._driver)
        else:
            self._board.replace(self._page, page, description)

    def _warn(self, error: Exception) -> None:
        """Tell once that pages are late."""
        if self._warned.acquire(blocking=False):
            why = str(error).partition("\n")[0] or type(error).__name__
            text = f"The run's pages in Prefect are late: {why}. The run goes on, and they follow when they can"
            self._run.emit(Message(text, "warning"))


def _sum(before: StepCost | None, cost: StepCost) -> StepCost:
    if before is None:
        return cost
    tokens = None if cost.tokens is None and before.tokens is None else (before.tokens or 0) + (cost.tokens or 0)
    return StepCost(
        step=cost.step,
        commits=before.commits + cost.commits,
        seconds=before.seconds + cost.seconds,
        device_seconds=before.device_seconds + cost.device_seconds,
        tokens=tokens,
    )


def _description(iteration: int) -> str:
    return f"Iteration {iteration}"


def _iteration_of(description: str) -> int:
    """The inverse of `_description`; -1 for what is none of these."""
    number = description.removeprefix("Iteration ")
    return int(number) if number.isdigit() else -1
