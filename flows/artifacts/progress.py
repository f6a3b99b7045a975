"""How far the step that runs is, as a progress bar in Prefect's interface."""

import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

from cairn.flows.artifacts.board import Board
from cairn.storage.commits import Step

INTERVAL = 2.0
"""Seconds between two updates: each takes the server 20 ms."""
PROGRESS = "-progress"


@dataclass
class IterationProgress:
    """What is known of the newest iteration."""

    iteration: int
    groups: dict[str | None, tuple[int, int]] = field(default_factory=dict)
    """Generated and all, by shard."""
    working: dict[tuple[Step, str | None], None] = field(default_factory=dict)
    """Steps that run, in the order of their starts."""

    @property
    def generated(self) -> int:
        """Groups."""
        return sum(generated for generated, _ in self.groups.values())

    @property
    def total(self) -> int:
        """Groups of all shards that have begun."""
        return sum(total for _, total in self.groups.values())

    @property
    def percent(self) -> float:
        """Groups generated of all."""
        return 100.0 * self.generated / self.total if self.total else 0.0

    def __str__(self) -> str:
        steps = ", ".join(dict.fromkeys(str(step) for step, _ in self.working)) or "between steps"
        return f"Iteration {self.iteration}: {steps}; {self.generated} of {self.total} groups generated"


class ProgressBar:
    """Shows the last that it was told, at most every INTERVAL seconds, from a thread of its own."""

    def __init__(self, board: Board, failed: Callable[[Exception], None]) -> None:
        """`failed` is told what the board raised; the next state is tried again."""
        self._board, self._failed = board, failed
        self._flow_run: UUID | None = None
        self._shown: UUID | None = None
        self._next: tuple[float, str] | None = None
        self._over = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, flow_run: UUID | None) -> None:
        """Show from now on, for a driver's flow run, where the caller's context has Prefect's server."""
        self._flow_run = flow_run
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), name="artifact-progress", daemon=True)
        self._thread.start()

    def show(self, percent: float, text: str) -> None:
        """The newest state."""
        with self._changed:
            self._next = (percent, text)
            self._changed.notify()

    def end(self, *, finish: bool) -> None:
        """Show what is left, for `finish`, and end."""
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
