"""Events of a step while it runs. `cairn.flows.events` adds the events of a driver about a whole run."""

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
    """Progress of a rollout shard: emitted when it begins to generate, and then at most every second."""

    iteration: int
    shard: str | None
    groups: int
    """Generated groups, including those that an interrupted attempt had finished."""
    total: int
    """Groups of the shard. With `rollout.partial_rollout` the shard may end before all are generated."""


@dataclass(frozen=True)
class StepCommitted:
    """A step, or one shard of it, is in the ledger."""

    commit: Commit
    adopted: bool = False
    """Whether the commit existed before this driver reached the step."""
    seconds: float = 0.0
    """Seconds from the start of the step to the end of its commit; 0 if the commit existed."""


@dataclass(frozen=True)
class Message:
    """A sentence for the person at the terminal: an engine restarted, an environment that changed, a wait."""

    text: str
    level: Literal["info", "warning"] = "info"


StepEvent = StepStarted | GroupsGenerated | StepCommitted | Message
