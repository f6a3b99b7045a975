"""Which failures of a step a new try can mend, how often it is tried, and what that came to.

| class | what failed |
|---|---|
| `engine_died`, `engine_timeout`, `engine` | an engine: its process is gone, it is silent, or anything else |
| `store` | the store did not answer, or not rightly |
| `disk` | no space is left, in the store or on this machine: somebody may free some |
| `grader` | the machine did not let a grader work, or what it asks does not answer |
| none | everything else, such as a bug, bad data, a refusal or a lost cluster: a new try would end the same |

How often and after which waits is said by `retry` of the configuration, by step and class. Each class is counted by
itself: a step that lost its engine as often as it may still waits for the store.
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
    """The class of an error that a new try of the step can mend; None for any other."""
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
    """What new tries of one step came to."""

    retries: Counter[ErrorClass] = field(default_factory=Counter)
    waited: float = 0.0
    """Seconds."""
    lost: float = 0.0
    """Seconds of the tries that failed."""
    wait: float = 0.0
    """Seconds still to wait before the next try."""
    error: object = None
    """That it is for."""

    def metrics(self) -> dict[str, float]:
        """As the step's commit records them."""
        return {f"retries/{kind}": count for kind, count in self.retries.items()}

    def timings(self) -> dict[str, float]:
        """The same, in seconds."""
        return {"retry_wait": self.waited, "failed_tries": self.lost} if self.retries else {}


class RetryTally:
    """New tries of the steps of a run under this driver. Thread-safe."""

    def __init__(self, policy: RetryConfig) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._tried: dict[Place, Tried] = {}
        self._total = 0

    @property
    def total(self) -> int:
        """New tries of all steps."""
        return self._total

    def most(self, step: Step) -> int:
        """New tries of one step, if it failed as often as it may in every way."""
        return sum(self._policy.policy(step, kind).retries for kind in get_args(ErrorClass))

    def granted(self, error: object) -> bool:
        """Whether a new try was granted after this very error."""
        with self._lock:
            return any(tried.error is error for tried in self._tried.values())

    def ask(self, place: Place, error: Exception) -> bool:
        """Whether the step is to be tried again after this error, and if so count it and set the wait before."""
        kind = error_class(error)
        with self._lock:
            if kind is None:
                self._tried.pop(place, None)
                return False
            tried = self._tried.setdefault(place, Tried())
            delays = self._policy.policy(place[1], kind).delays()
            count = tried.retries[kind]
            if count >= len(delays):
                del self._tried[place]  # should somebody call the step once more, it has all its tries
                return False
            tried.retries[kind] += 1
            tried.wait, tried.error = delays[count], error
            self._total += 1
            return True

    def failed(self, place: Place, seconds: float) -> None:
        """A try of the step has failed, after so long."""
        with self._lock:
            self._tried.setdefault(place, Tried()).lost += seconds

    def next_wait(self, place: Place) -> float:
        """Seconds to wait before the try that begins now; they count as waited."""
        with self._lock:
            tried = self._tried.get(place)
            if tried is None:
                return 0.0
            wait, tried.wait = tried.wait, 0.0
            tried.waited += wait
            return wait

    def take(self, place: Place) -> Tried:
        """What the new tries of a step came to, which has now succeeded."""
        with self._lock:
            return self._tried.pop(place, Tried())
