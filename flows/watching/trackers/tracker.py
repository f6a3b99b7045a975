"""Trackers: external copies of a run's metrics, without duplicates.

An iteration is one point, an evaluation another. A driver first queries which points the board has and writes the
missing ones, whichever driver executed them. So a kill duplicates nothing and loses nothing, and a deleted board is
restored completely.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cairn.configs.schema.run import RunConfig
from cairn.flows.events import Event, IterationDone, RunDone, RunStarted
from cairn.flows.reading.metrics import eval_metrics
from cairn.flows.watching.alarms import MetricHistory
from cairn.storage.ledger.commits import Commit
from cairn.storage.ledger.ledger import Ledger


@dataclass
class Written:
    """Points on a board."""

    iterations: set[int] = field(default_factory=set)
    """Numbers of iterations."""
    evaluations: set[int] = field(default_factory=set)
    """Evaluations, by the number of iterations that the evaluated weights were trained for."""


class Board(Protocol):
    """Destination of a tracker's points. Used by one thread."""

    def written(self) -> Written:
        """Return the existing points; called once before anything is written."""

    def write(self, step: int, metrics: Mapping[str, float], wall_time: float, *, is_evaluation: bool) -> None:
        """Add a point with a time in Unix seconds."""

    def flush(self) -> None:
        """Make written points durable. A point is stored completely or not at all."""

    def close(self, *, completed: bool) -> None:
        """Close the board. `completed`: the run has all its iterations."""


class Tracker:
    """A watcher that maintains a board. The board is opened at the first event, in the watcher's thread."""

    def __init__(self, ledger: Ledger, config: RunConfig, open_board: Callable[[], Board]) -> None:
        self._ledger = ledger
        self._config = config
        self._open_board = open_board
        self._history = MetricHistory(ledger, config)
        self._board: Board | None = None
        self._written = Written()
        self._caught_up = 0
        """Number of the first iteration that may be missing on the board."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._catch_up(event.iteration)
        elif isinstance(event, IterationDone):
            self._catch_up(event.iteration)
            self._add(event.iteration, event.commits)
        elif isinstance(event, RunDone):
            self._catch_up(self._config.rollout.num_rollout)

    def close(self) -> None:
        if self._board is not None:
            self._board.close(completed=True)

    def stop(self) -> None:
        if self._board is not None:
            self._board.close(completed=False)

    def _catch_up(self, until: int) -> None:
        """Write the iterations before `until` that the board lacks."""
        board = self._opened()
        for iteration in range(self._caught_up, until):
            if iteration not in self._written.iterations:
                self._add(iteration, self._ledger.commits(iteration))
        self._caught_up = max(self._caught_up, until)
        board.flush()

    def _add(self, iteration: int, commits: Iterable[Commit]) -> None:
        self._ledger.require_lease()  # else the next driver has queried the missing points and writes them
        board, commits = self._opened(), list(commits)
        wall_time = max(commit.committed_at for commit in commits)
        for trained, metrics in eval_metrics(commits).items():
            if trained not in self._written.evaluations:
                board.write(trained, metrics, wall_time, is_evaluation=True)
                self._written.evaluations.add(trained)
        if iteration not in self._written.iterations:
            board.write(iteration, self._history.metrics(iteration, commits), wall_time, is_evaluation=False)
            self._written.iterations.add(iteration)
        board.flush()

    def _opened(self) -> Board:
        if self._board is None:
            self._board = self._open_board()
            self._written = self._board.written()
        return self._board
