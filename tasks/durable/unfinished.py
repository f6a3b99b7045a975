"""Steps that an iteration does not wait for, and whose commits those of later iterations wait for.

A driver that resumes enters the open iterations only: the newest one with a commit, and as many before it as the lag
(`cairn.tasks.halves.oldest_open`). So a commit of iteration i is made once every step before i - lag is committed.
"""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Any, Protocol


class Submitted(Protocol):
    """A submitted step."""

    def result(self) -> Any: ...

    def add_done_callback(self, fn: Callable[[Any], None], /) -> None: ...


class Unfinished:
    """Submitted steps that are not committed, by iteration. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._steps: dict[int, Future[None]] = {}

    def add(self, iteration: int, step: Submitted) -> None:
        """Have `wait` wait for a step."""
        ended: Future[None] = Future()

        def end(_: Any) -> None:
            try:
                step.result()
            except BaseException as error:
                ended.set_exception(error)
                return
            with self._lock:
                self._steps.pop(iteration, None)
            ended.set_result(None)

        with self._lock:
            self._steps[iteration] = ended
        step.add_done_callback(end)

    def wait(self, before: int) -> None:
        """Return once all steps of iterations before one are committed. Raises the error of one that failed."""
        with self._lock:
            steps = [step for iteration, step in self._steps.items() if iteration < before]
        for step in steps:
            step.result()
