"""The watcher that publishes a run's pages in Prefect's UI.

| event | effect on the pages |
|---|---|
| an iteration is complete | its page is created once, in the iteration's flow run; the run's page is replaced |
| a driver begins | missing pages of earlier drivers are created first: the newest CATCH_UP at most |
| Prefect, or the store, does not respond | one warning; missing pages are created when it responds again |
| another driver has acquired the run | no further page is created |
"""

import contextvars
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import ArtifactFilter
from prefect.client.schemas.sorting import ArtifactSort
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import PrefectException

from cairn.flows.events import Event, IterationDone, RunDone, RunStarted
from cairn.flows.orchestration.artifacts.pages import (
    Picked,
    board_link,
    curve,
    iteration_page,
    picked_samples,
    run_page,
)
from cairn.flows.reading.costs import StepCost, step_costs
from cairn.flows.reading.metrics import eval_metrics, in_short, iteration_metrics, mean_reward
from cairn.flows.reading.samples import benchmark_scores
from cairn.flows.text import slug
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.store.errors import Damaged, Retired, StoreError
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import GroupsGenerated, Message, StepCommitted, StepStarted
from cairn.tasks.durable.selection import find_selection

# Prefect artifacts for pages: created, queried and replaced by their keys.
#
#     run-<name>-<digits>              the page of a run: one artifact for each driver, replaced while it runs
#     run-<name>-<digits>-iteration    the pages of its iterations: one artifact for each iteration, never replaced
#     run-<name>-<digits>-progress     progress of the running step: one artifact for each driver
#
# The digits come from the run's manifest. So no two runs share a key, and a run has the same keys on every machine.


PAGE = 200
"""Number of artifacts in one response of Prefect."""
_LONGEST_NAME = 60


def run_key(ledger: Ledger) -> str:
    """Return the key of a run's page, which is also the prefix of its other keys."""
    return f"run-{slug(ledger.run)[:_LONGEST_NAME]}-{ledger.manifest.identity[:12]}"


class Board:
    """The artifacts of one run. Used by one thread. Connects at the first request, and again after an error and
    `close`."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._client: SyncPrefectClient | None = None

    def create(self, suffix: str, type: str, data: Any, description: str, flow_run: UUID | None) -> UUID:
        """Create an artifact of a flow run; return its id."""
        artifact = ArtifactCreate(
            key=self._key + suffix, type=type, data=data, description=description, flow_run_id=flow_run
        )
        return self._connected().create_artifact(artifact).id

    def replace(self, artifact: UUID, data: Any, description: str) -> None:
        """Replace the content of an artifact."""
        # The client's own method would send the content a second time, as an event.
        self._connected().request(
            "PATCH",
            "/artifacts/{id}",
            json={"data": data, "description": description},
            path_params={"id": artifact},
        )

    def descriptions(self, suffix: str) -> list[str]:
        """Return the descriptions of the newest artifacts with a key, newest first; at most `PAGE`."""
        artifacts = self._connected().read_artifacts(
            artifact_filter=ArtifactFilter.model_validate({"key": {"any_": [self._key + suffix]}}),
            sort=ArtifactSort.CREATED_DESC,
            limit=PAGE,
        )
        return [artifact.description or "" for artifact in artifacts]

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        client, self._client = self._client, None
        if client is not None:
            client.__exit__(None, None, None)

    def _connected(self) -> SyncPrefectClient:
        if self._client is None:
            self._client = get_client(sync_client=True).__enter__()
        return self._client


def current_flow_run_id() -> UUID | None:
    """Return the id of the current flow run, in a flow's body or in a task; None outside of both."""
    task, flow = TaskRunContext.get(), FlowRunContext.get()
    if task is not None:
        return task.task_run.flow_run_id
    return None if flow is None or flow.flow_run is None else flow.flow_run.id


# Progress of the running step, as a progress bar in Prefect's UI.


INTERVAL = 2.0
"""Seconds between two updates; each takes the server 20 ms."""
PROGRESS = "-progress"


@dataclass
class IterationProgress:
    """Progress of the newest iteration."""

    iteration: int
    groups: dict[str | None, tuple[int, int]] = field(default_factory=dict)
    """Number of generated groups and of all groups, by shard."""
    working: dict[tuple[Step, str | None], None] = field(default_factory=dict)
    """Running steps, in the order of their starts."""

    @property
    def generated(self) -> int:
        """Number of generated groups."""
        return sum(generated for generated, _ in self.groups.values())

    @property
    def total(self) -> int:
        """Number of groups of all shards that have begun."""
        return sum(total for _, total in self.groups.values())

    @property
    def percent(self) -> float:
        """Percentage of groups that have been generated."""
        return 100.0 * self.generated / self.total if self.total else 0.0

    def __str__(self) -> str:
        steps = ", ".join(dict.fromkeys(str(step) for step, _ in self.working)) or "between steps"
        return f"Iteration {self.iteration}: {steps}; {self.generated} of {self.total} groups generated"


class ProgressBar:
    """Shows the newest state, at most every INTERVAL seconds, from its own thread."""

    def __init__(self, board: Board, failed: Callable[[Exception], None]) -> None:
        """`failed` receives the board's error; the next state is sent again."""
        self._board, self._failed = board, failed
        self._flow_run: UUID | None = None
        self._shown: UUID | None = None
        self._next: tuple[float, str] | None = None
        self._over = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, flow_run: UUID | None) -> None:
        """Start the thread, for a driver's flow run. The caller's context must contain Prefect's server."""
        self._flow_run = flow_run
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), name="artifact-progress", daemon=True)
        self._thread.start()

    def show(self, percent: float, text: str) -> None:
        """Set the newest state."""
        with self._changed:
            self._next = (percent, text)
            self._changed.notify()

    def end(self, *, finish: bool) -> None:
        """End the thread; with `finish`, show the pending state first and wait for that."""
        with self._changed:
            self._over = True
            if not finish:
                self._next = None
            self._changed.notify()
        if finish and self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._over)
                state, self._next = self._next, None
            if state is None:
                break
            try:
                self._send(*state)
            except Exception as error:
                self._board.close()
                self._failed(error)
            with self._changed:
                self._changed.wait_for(lambda: self._over, INTERVAL)
        self._board.close()

    def _send(self, percent: float, text: str) -> None:
        if self._shown is None:
            self._shown = self._board.create(PROGRESS, "progress", percent, text, self._flow_run)
        else:
            self._board.replace(self._shown, percent, text)


CATCH_UP = 100
"""Number of pages of earlier iterations that a driver creates at most."""
POINTS = 400
"""Number of points of earlier iterations on the reward curve, at most."""
POINTS_AT_ONCE = 4
"""Points of these that a driver reads at its start, and with each iteration. The first ones span the whole run."""
PAGE_INTERVAL = 5.0
"""Seconds between two updates of the run's page."""
ITERATION = "-iteration"

_TRANSIENT_ERRORS = (httpx.HTTPError, PrefectException, OSError, RuntimeError, StoreError)
"""Errors of Prefect's client, and of the store, after which pages are retried."""


class Pages:
    """The watcher that the module describes; see `cairn.flows.watching.watchers.Watcher`."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        key = run_key(run.ledger)
        self._board = Board(key)
        self._bar = ProgressBar(Board(key), self._warn)
        self._now = IterationProgress(-1)
        self._flow_runs: dict[int, UUID] = {}
        self._driver: UUID | None = None
        self._page: UUID | None = None
        self._page_shown_at = float("-inf")
        self._missing: dict[int, Sequence[Commit] | None] = {}
        """Iterations without a page, with their commits where they are known."""
        self._existing: set[int] | None = None
        """Iterations with a page; None: unknown, to be queried from Prefect."""
        self._rewards: dict[int, float] = {}
        self._unread: list[int] = []
        """Earlier iterations whose rewards are still to be read, the next ones last."""
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
                self._read_rewards(POINTS_AT_ONCE)
                self._publish(now=False)
            case RunDone():
                self._bar.show(100.0, f"Done: {self._done} iterations")
                self._read_rewards(POINTS)
                self._publish(now=True)
                self._bar.end(finish=True)

    def close(self) -> None:
        self._board.close()

    def stop(self) -> None:
        self._bar.end(finish=False)
        with suppress(Exception):
            self._board.close()

    def _begin(self, first: int) -> None:
        """Prepare for a driver that starts at iteration `first`."""
        ledger = self._run.ledger
        self._driver = current_flow_run_id()
        self._bar.begin(self._driver)
        self._done = first
        self._unread = _finest_first(range(first - 1, -1, -first // POINTS or -1))
        self._read_rewards(POINTS_AT_ONCE)
        self._scores = benchmark_scores(ledger, self._run.config)
        self._newest = self._run.find(first - 1, Step.TRAIN) if first else None
        own = range(max(ledger.first_iteration, first - CATCH_UP), first)
        self._missing = dict.fromkeys(own)
        self._publish(now=True)

    def _follow(self, event: StepStarted | GroupsGenerated | StepCommitted) -> None:
        iteration = event.commit.iteration if isinstance(event, StepCommitted) else event.iteration
        flow_run = current_flow_run_id()
        if flow_run is not None:
            self._flow_runs[iteration] = flow_run
        if iteration > self._now.iteration:
            self._now = IterationProgress(iteration)
        elif iteration < self._now.iteration:
            return  # an earlier iteration, whose other half still runs
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
        metrics = iteration_metrics(commits, self._run.ledger.config_of(*commits))
        reward = mean_reward(metrics)
        if reward is not None:
            self._rewards[index] = reward
        for trained, scores in eval_metrics(commits).items():
            for benchmark in self._run.config.eval.benchmarks:
                if f"eval/{benchmark.name}" in scores:
                    self._scores.setdefault(benchmark.name, {})[trained] = scores[f"eval/{benchmark.name}"]
        for cost in step_costs(commits, self._run.ledger.config_of):
            self._costs[cost.step] = _sum(self._costs.get(cost.step), cost)
        self._done = max(self._done, index + 1)
        self._newest = next((commit for commit in commits if commit.step is Step.TRAIN), self._newest)
        self._missing[index] = commits

    def _read_rewards(self, most: int) -> None:
        for _ in range(min(most, len(self._unread))):
            index = self._unread.pop()
            selection = find_selection(self._run, index)
            if selection is not None and "raw_reward" not in selection.metrics:  # earlier versions: of trained samples
                selection = self._run.find(index, Step.ADVANTAGE)
            if selection is not None and "raw_reward" in selection.metrics:
                self._rewards[index] = selection.metrics["raw_reward"]

    def _publish(self, *, now: bool) -> None:
        """Create missing pages; replace the run's page if `now`, or if PAGE_INTERVAL has passed."""
        self._run.ledger.require_lease()  # else the next driver has queried the pages and creates them
        try:
            self._create_missing()
            if now or time.monotonic() - self._page_shown_at >= PAGE_INTERVAL:
                self._show_run()
                self._page_shown_at = time.monotonic()
        except _TRANSIENT_ERRORS as error:
            self._existing = None  # a request may have arrived although it failed
            self._board.close()
            self._warn(error)

    def _create_missing(self) -> None:
        if self._existing is None:
            self._existing = set(map(_iteration_of, self._board.descriptions(ITERATION)))
        for index in sorted(self._missing):
            if index not in self._existing:
                commits = self._missing[index] or self._run.ledger.commits(index)
                flow_run = self._flow_runs.get(index, self._driver)
                config = self._run.ledger.config_of(*commits)
                page = iteration_page(self._run.ledger, config, commits, self._samples(commits))
                short = f"Iteration {index}: {in_short(iteration_metrics(commits, config))}"
                card = "\n\n".join([short, *board_link(self._run.ledger.run)])
                self._board.create(ITERATION, "markdown", page, card, flow_run)
                self._existing.add(index)
            del self._missing[index]
            self._flow_runs.pop(index, None)

    def _samples(self, commits: Sequence[Commit]) -> list[Picked] | None:
        try:
            return picked_samples(commits, self._run.read)
        except (Retired, Damaged, StoreError):
            return None

    def _show_run(self) -> None:
        costs = [self._costs[step] for step in Step if step in self._costs]
        ledger, config = self._run.ledger, self._run.config
        page = run_page(ledger, config, self._done, self._newest, self._scores, costs)
        reward = f", reward {self._rewards[max(self._rewards)]:.3f}" if self._rewards else ""
        # Cards of the flow run's page show this, in Prefect's older interface only the first paragraph.
        parts = [curve(self._rewards, self._scores), f"{self._done} of {config.rollout.num_rollout} iterations{reward}"]
        description = "\n\n".join([*filter(None, parts), *board_link(ledger.run)])
        if self._page is None:
            self._page = self._board.create("", "markdown", page, description, self._driver)
        else:
            self._board.replace(self._page, page, description)

    def _warn(self, error: Exception) -> None:
        """Report once that pages are late."""
        if self._warned.acquire(blocking=False):
            why = str(error).partition("\n")[0] or type(error).__name__
            text = f"The run's pages in Prefect are late: {why}. The run continues, and the pages follow later"
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


def _finest_first(indexes: Sequence[int]) -> list[int]:
    """Return the indexes in an order of which the last ones, however many, span all of them."""
    return [indexes[i] for i in sorted(range(len(indexes)), key=lambda i: i & -i or len(indexes))]


def _iteration_of(description: str) -> int:
    """Return the iteration of a page's description, such as `Iteration 3: reward 0.5`; -1 for other text."""
    match = re.match(r"Iteration (\d+)", description)
    return int(match[1]) if match else -1
