"""Retries of steps: which failures a retry can mend, how often a step is retried, and the counts.

| class | what failed |
|---|---|
| `engine_died`, `engine_timeout`, `engine` | an engine: its process is gone, it is silent, or anything else |
| `store` | the store did not respond, or responded incorrectly |
| `disk` | no space is left, in the store or on this machine: a person may free some |
| `grader` | the machine did not let a grader work, or a service that it calls does not respond |
| none | everything else, such as a bug, bad data, a refusal or a lost cluster: a retry would end the same |

`retry` of the configuration sets the number of retries and the waits before them, by step and class. Each class is
counted by itself: a step that has used up its retries for lost engines is still retried after an error of the store.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import get_args

from cairn.configs.schema.operations import ErrorClass, RetryConfig
from cairn.engines.types.errors import ClusterLost, EngineDied, EngineError, EngineTimeout, GraderUnavailable
from cairn.storage.ledger.commits import Step
from cairn.storage.store.errors import NO_SPACE, NoSpace, StoreError, StoreRefused

Place = tuple[int, Step, str | None]
"""Iteration, step and shard."""


def error_class(error: object) -> ErrorClass | None:
    """Return the class of an error that a retry of the step can mend; None for any other."""
    match error:
        case ClusterLost():
            return None
        case EngineDied():
            return "engine_died"
        case EngineTimeout():
            return "engine_timeout"
        case EngineError():
            return "engine"
        case NoSpace():
            return "disk"
        case StoreRefused():
            return None
        case StoreError():
            return "store"
        case GraderUnavailable():
            return "grader"
        case OSError() if error.errno in NO_SPACE:
            return "disk"
    return None


@dataclass
class Tried:
    """Retries of one step and what they cost."""

    retries: Counter[ErrorClass] = field(default_factory=Counter)
    waited: float = 0.0
    """Seconds waited before retries."""
    lost: float = 0.0
    """Seconds spent in tries that failed."""
    wait: float = 0.0
    """Seconds still to wait before the next try."""
    error: object = None
    """Error that the next try follows."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics for the step's commit."""
        return {f"retries/{kind}": count for kind, count in self.retries.items()}

    def timings(self) -> dict[str, float]:
        """Return the timings for the step's commit, in seconds."""
        return {"retry_wait": self.waited, "failed_tries": self.lost} if self.retries else {}


@dataclass(frozen=True)
class GivenUp:
    """A step that failed and is not retried."""

    place: Place
    tries: int
    error: Exception


class RetryTally:
    """Retries of the steps of a run under this driver. Thread-safe."""

    def __init__(self, policy: RetryConfig) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._tried: dict[Place, Tried] = {}
        self._total = 0
        self.given_up: list[GivenUp] = []
        """Steps that failed and are not retried."""

    @property
    def total(self) -> int:
        """Retries of all steps together."""
        return self._total

    def most(self, step: Step) -> int:
        """Return the largest number of retries of one step: the sum over all error classes."""
        return sum(self._policy.policy(step, kind).retries for kind in get_args(ErrorClass))

    def was_granted(self, error: object) -> bool:
        """Return whether a retry was granted after this very error object."""
        with self._lock:
            return any(tried.error is error for tried in self._tried.values())

    def ask(self, place: Place, error: Exception) -> bool:
        """Return whether the step must be retried after this error. If so, count the retry and set the wait before
        it."""
        kind = error_class(error)
        with self._lock:
            if kind is None:
                self._give_up(place, error)
                return False
            tried = self._tried.setdefault(place, Tried())
            delays = self._policy.policy(place[1], kind).delays()
            count = tried.retries[kind]
            if count >= len(delays):
                self._give_up(place, error)  # a later call of the step has all its tries
                return False
            tried.retries[kind] += 1
            tried.wait, tried.error = delays[count], error
            self._total += 1
            return True

    def _give_up(self, place: Place, error: Exception) -> None:
        tried = self._tried.pop(place, Tried())
        self.given_up.append(GivenUp(place, 1 + tried.retries.total(), error))

    def failed(self, place: Place, seconds: float) -> None:
        """Record that a try of the step failed after `seconds`."""
        with self._lock:
            self._tried.setdefault(place, Tried()).lost += seconds

    def next_wait(self, place: Place) -> float:
        """Return the seconds to wait before the try that begins now, and count them as waited."""
        with self._lock:
            tried = self._tried.get(place)
            if tried is None:
                return 0.0
            wait, tried.wait = tried.wait, 0.0
            tried.waited += wait
            return wait

    def take(self, place: Place) -> Tried:
        """Return and forget the retries of a step, which has now succeeded."""
        with self._lock:
            return self._tried.pop(place, Tried())
