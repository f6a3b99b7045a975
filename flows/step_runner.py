"""Interfaces for executing the steps of an iteration."""

from collections.abc import Callable
from typing import Any, Protocol

from cairn.storage.ledger.commits import Commit
from cairn.tasks.durable.step import DurableStep


class Pending(Protocol):
    """A submitted step."""

    def result(self) -> Any:
        """Wait for the step and return its commit; raise the step's error."""
        ...

    def add_done_callback(self, fn: Callable[[Any], None], /) -> None:
        """Have `fn` called once the step has ended, in whatever way; at once if it has."""
        ...


class StepRunner(Protocol):
    """Executes steps: as Prefect tasks, or by direct calls."""

    def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        """Execute a step and return its commit."""
        ...

    def submit(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Pending:
        """Start a step concurrently with others; arguments may be pending steps."""
        ...
