"""What a step tells while it works. `cairn.flows.events` adds what a driver tells about a whole run."""

from dataclasses import dataclass
from typing import Literal

from cairn.storage.ledger.commits import Commit, Step


@dataclass(frozen=True)
class StepStarted:
    """A step, or one shard of it, is about to do work."""

    iteration: int
    step: Step
    shard: str | None = None


@dataclass(frozen=True)
class GroupsGenerated:
    """How far a rollout shard is: told when it begins to generate and then, while it lasts, at most every second."""

    iteration: int
    shard: str | None
    groups: int
    """Generated, those that an interrupted attempt had finished included."""
    total: int
    """Of the shard; it may end before all of them with `rollout.partial_rollout`."""


@dataclass(frozen=True)
class StepCommitted:
    """A step, or one shard of it, is in the ledger."""

    commit: Commit
    adopted: bool = False
    """It was there before this driver came to it."""
    seconds: float = 0.0
    """From the start of the step to the end of its commit; 0 if it was there."""


@dataclass(frozen=True)
class Message:
    """A sentence for the person at the terminal: an engine restarted, an environment that changed, a wait."""

    text: str
    level: Literal["info", "warning"] = "info"


StepEvent = StepStarted | GroupsGenerated | StepCommitted | Message
