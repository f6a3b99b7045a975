"""Metrics of samples whose code is recorded: what they asked of the policy and of tools, and what the world gave."""

import re
import time
from collections import Counter
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from cairn.engines.types.trajectories import GeneratedSample
from cairn.engines.types.types import FinishReason
from cairn.tasks.durable.events import GroupsGenerated
from cairn.tasks.durable.step import StepCall

# How far a shard of rollout is, told while it generates.


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


def episode_metrics(samples: pa.Table, calls: pa.Table | None) -> dict[str, float]:
    """Of all samples of a shard, failed ones included; nothing where no calls are recorded.

    Args:
        samples: rows of the rollout table.
        calls: rows of CALLS; one without an answer counts as a call, and neither as failed nor in seconds.
    """
    if calls is None:
        return {}
    rows = calls.select(["group_id", "sample_index", "order", "kind", "name", "error", "seconds"]).to_pylist()
    asked = Counter((row["group_id"], row["sample_index"]) for row in rows if row["kind"] == "sample")
    tools = [row for row in rows if row["kind"] == "tool"]
    failures = Counter(row["name"] for row in tools if row["error"] is not None)
    return {
        "policy_calls": sum(asked.values()),
        "policy_calls/max": max(asked.values(), default=0),
        "tool_calls": len(tools),
        "tool_seconds": sum(row["seconds"] for row in tools if row["order"] is not None),
        "tool_failures": sum(failures.values()),
        **{f"tool_failures/{name}": count for name, count in sorted(failures.items())},
        "world_tokens": _world_tokens(samples),
    }


def _world_tokens(samples: pa.Table) -> int:
    """Tokens of responses that the policy did not sample."""
    segments = samples.column("segments").combine_chunks().flatten()
    given = segments.filter(pc.is_null(segments.field("call")))
    return pc.sum(given.field("tokens")).as_py() or 0


# What samples failed of while they were generated, by name, for counting.


REFUSED = "refused"
"""By the engine, or for tokens that the model cannot take: such errors have no name."""
_NAMED = re.compile(r"(?:generate: )?([A-Z]\w+): ")


def failure_metrics(samples: pa.Table) -> dict[str, float]:
    """How many samples of a rollout table failed of what, each of its own."""
    counts = Counter(failure_name(error) for error in samples.column("error").to_pylist() if error is not None)
    return {f"failed/{name}": float(count) for name, count in sorted(counts.items())}


def failure_name(error: str) -> str:
    """Of the error of a sample: that of an exception, or of a deadline."""
    named = _NAMED.match(error)
    return REFUSED if named is None else named[1]
