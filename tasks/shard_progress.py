"""How far a shard of rollout is, told while it generates."""

import time
from collections import Counter
from collections.abc import Iterable

from cairn.engines.trajectories import GeneratedSample
from cairn.engines.types import FinishReason
from cairn.tasks.events import GroupsGenerated
from cairn.tasks.step import StepCall

INTERVAL = 1.0
"""Seconds between two events of a shard."""


class ShardProgress:
    """Counts the groups of a shard as their last samples come."""

    def __init__(self, step: StepCall, missing: dict[int, int]) -> None:
        """`missing`: samples that are yet to come, by group."""
        self._step = step
        self._missing = Counter(missing)
        self._total = len(missing)
        self._told = float("-inf")
        self._tell()

    def take(self, samples: Iterable[GeneratedSample]) -> None:
        """Some have come."""
        self._missing.subtract(sample.group_id for sample in samples if sample.finish_reason != FinishReason.ABORT)
        if time.monotonic() - self._told >= INTERVAL:
            self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        groups = sum(left <= 0 for left in self._missing.values())
        self._step.run.emit(GroupsGenerated(self._step.iteration, self._step.shard, groups, self._total))
