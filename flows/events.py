"""Events of a running driver: the `on_event` callback of `cairn.flows.train.start` receives them in order.

A run of three steps over two iterations emits: RunStarted, (StepStarted, StepCommitted) × steps, IterationDone, …,
RunDone. A step that was already in the ledger has no StepStarted: its StepCommitted has `adopted` set. Shards of one
step may interleave. Between StepStarted and StepCommitted, a rollout shard emits GroupsGenerated.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cairn.storage.ledger.commits import Commit
from cairn.tasks.durable.events import GroupsGenerated, Message, StepCommitted, StepEvent, StepStarted


@dataclass(frozen=True)
class RunStarted:
    """The driver owns the run and is about to start at `iteration`."""

    run: str
    epoch: int
    iteration: int
    """First iteration that is not complete."""
    iterations: int
    """Number of iterations of the whole run: `rollout.num_rollout`."""


@dataclass(frozen=True)
class IterationDone:
    """Every step of the iteration is committed.

    Everything else can be derived from its commits: `cairn.flows.reading.metrics`.
    """

    iteration: int
    commits: tuple[Commit, ...]
    store_retries: int = 0
    """Requests and operations that the driver's store retried since the previous IterationDone."""


@dataclass(frozen=True)
class RunDone:
    """The last iteration is complete."""

    run: str
    weight_version: int
    state_digest: str
    store_retries: int = 0
    """Requests and operations that the driver's store retried since this driver started."""


Event = RunStarted | StepEvent | IterationDone | RunDone
OnEvent = Callable[[Event], None]

__all__ = [
    "Event",
    "GroupsGenerated",
    "IterationDone",
    "Message",
    "OnEvent",
    "RunDone",
    "RunStarted",
    "StepCommitted",
    "StepStarted",
]


class Stopping(Exception):
    """The driver is about to end, and starts no further step."""
