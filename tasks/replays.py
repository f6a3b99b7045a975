"""Committed train steps that a driver does again to restore the trainer, until a commit records them.

A restore may come before any step, for the publications that open halves need, or within one. So the next commit of the
driver records what was replayed since the one before, whatever step that is.
"""

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Replayed:
    """Train steps that were done again, and the seconds that they took."""

    steps: int = 0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """As a commit records them; nothing where there were none."""
        return {"recovery/replayed_steps": self.steps} if self.steps else {}

    def timings(self) -> dict[str, float]:
        """The same, in seconds."""
        return {"replay": self.seconds} if self.steps else {}


class ReplayTally:
    """What no commit has recorded yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replayed = Replayed()

    def add(self, seconds: float) -> None:
        """A step was replayed."""
        with self._lock:
            self._replayed = Replayed(self._replayed.steps + 1, self._replayed.seconds + seconds)

    def take(self) -> Replayed:
        """What was replayed since this was last asked."""
        with self._lock:
            replayed, self._replayed = self._replayed, Replayed()
            return replayed
