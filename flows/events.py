"""What a driver tells while it works: `on_event` of `flows.train.start` receives these, in the order in which they happen.

A run of three steps over two iterations tells: RunStarted, (StepStarted, StepCommitted) × steps, IterationDone, …,
RunDone. A step that was already in the ledger has no StepStarted: its StepCommitted says `adopted`. Shards of one step
may interleave.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from storage.commits import Commit, Step


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
class StepStarted:
    """A step, or one shard of it, is about to do work."""

    iteration: int
    step: Step
    shard: str | None = None


@dataclass(frozen=True)
class StepCommitted:
    """A step, or one shard of it, is in the ledger."""

    commit: Commit
    adopted: bool = False
    """It was there before this driver came to it."""


@dataclass(frozen=True)
class IterationDone:
    """Every step of the iteration is committed. All else is a view of its commits: see `flows.metrics`."""

    iteration: int
    commits: tuple[Commit, ...]


@dataclass(frozen=True)
class RunDone:
    """The last iteration is done."""

    run: str
    weight_version: int
    state_digest: str


@dataclass(frozen=True)
class Message:
    """A sentence for the person at the terminal: an engine restarted, an environment that changed, a wait."""

    text: str
    level: Literal["info", "warning"] = "info"


Event = RunStarted | StepStarted | StepCommitted | IterationDone | RunDone | Message
OnEvent = Callable[[Event], None]
