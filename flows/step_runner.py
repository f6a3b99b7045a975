"""Who executes the steps of an iteration."""

from typing import Any, Protocol

from cairn.storage.ledger.commits import Commit
from cairn.tasks.durable.step import DurableStep


class Pending(Protocol):
    """A step that was submitted."""

    def result(self) -> Any:
        """Its commit; raises what the step raised."""
        ...


class StepRunner(Protocol):
    """How steps are executed: as Prefect tasks, or called directly."""

    def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        """Execute a step and return its commit."""
        ...

    def submit(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Pending:
        """Start a step beside others; arguments may be pending steps."""
        ...
