"""What a driver tells while it works: `on_event` of `cairn.flows.train.start` receives these, in the order of the
events.

A run of three steps over two iterations tells: RunStarted, (StepStarted, StepCommitted) × steps, IterationDone, …,
RunDone. A step that was already in the ledger has no StepStarted: its StepCommitted says `adopted`. Shards of one step
may interleave. Between the two, a rollout shard tells GroupsGenerated.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cairn.storage.ledger.commits import Commit
from cairn.tasks.durable.events import GroupsGenerated, Message, StepCommitted, StepEvent, StepStarted


@dataclass(frozen=True)
class RunStarted:
    """The driver owns the run and is about to go on from `iteration`."""

    run: str
    epoch: int
    iteration: int
    """The first that is not complete."""
    iterations: int
    """All of the run: `rollout.num_rollout`."""


@dataclass(frozen=True)
class IterationDone:
    """Every step of the iteration is committed. All else is a view of its commits: `cairn.flows.reading.metrics`."""

    iteration: int
    commits: tuple[Commit, ...]
    store_retries: int = 0
    """Requests and operations that the driver's store had to try again meanwhile."""


@dataclass(frozen=True)
class RunDone:
    """The last iteration is done."""

    run: str
    weight_version: int
    state_digest: str
    store_retries: int = 0
    """Of the whole of this driver's time."""


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
    """The driver is about to end, and begins no step."""
