"""Progress of a rollout shard, and metrics of its samples: calls of the policy and of tools, and failures."""

import re
import time
from collections import Counter
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from cairn.engines.types.keeping import SampleEnd
from cairn.engines.types.types import FinishReason
from cairn.tasks.durable.events import GroupsGenerated
from cairn.tasks.durable.step import StepCall

# Progress of a rollout shard, reported while it generates.


INTERVAL = 1.0
"""Seconds between two events of a shard."""


class ShardProgress:
    """Counter of the groups of a shard whose samples have all been generated."""

    def __init__(self, step: StepCall, missing: dict[int, int]) -> None:
        """Begin to count. `missing`: number of samples still to be generated, by group."""
        self._step = step
        self._missing = Counter(missing)
        self._total = len(missing)
        self._reported_at = float("-inf")
        self._report()

    def take(self, samples: Iterable[SampleEnd]) -> None:
        """Count generated samples, and emit the progress at most every `INTERVAL` seconds."""
        self._missing.subtract(sample.group_id for sample in samples if sample.finish_reason != FinishReason.ABORT)
        if time.monotonic() - self._reported_at >= INTERVAL:
            self._report()

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        groups = sum(left <= 0 for left in self._missing.values())
        self._step.run.emit(GroupsGenerated(self._step.iteration, self._step.shard, groups, self._total))


def episode_metrics(samples: pa.Table, calls: pa.Table | None) -> dict[str, float]:
    """Return metrics of all samples of a shard, including failed ones; empty where no calls are recorded.

    Args:
        samples: rows of the rollout table.
        calls: rows of CALLS. One without a response counts as a call, but neither as a failure nor in seconds.
    """
    if calls is None:
        return {}
    rows = calls.select(["group_id", "sample_index", "order", "kind", "name", "error", "seconds"]).to_pylist()
    policy_calls = Counter((row["group_id"], row["sample_index"]) for row in rows if row["kind"] == "sample")
    tools = [row for row in rows if row["kind"] == "tool"]
    failures = Counter(row["name"] for row in tools if row["error"] is not None)
    return {
        "policy_calls": sum(policy_calls.values()),
        "policy_calls/max": max(policy_calls.values(), default=0),
        "tool_calls": len(tools),
        "tool_seconds": sum(row["seconds"] for row in tools if row["order"] is not None),
        "tool_failures": sum(failures.values()),
        **{f"tool_failures/{name}": count for name, count in sorted(failures.items())},
        "world_tokens": _world_tokens(samples),
    }


def _world_tokens(samples: pa.Table) -> int:
    """Return the number of response tokens that the policy did not sample."""
    segments = samples.column("segments").combine_chunks().flatten()
    world = segments.filter(pc.is_null(segments.field("call")))
    return pc.sum(world.field("tokens")).as_py() or 0


# Counts of the samples that failed during generation, by error name.


REFUSED = "refused"
"""Name of errors that have none: the engine rejected the sample, or the model cannot take its tokens."""
_NAMED = re.compile(r"(?:generate: )?([A-Z]\w+): ")


def failure_metrics(samples: pa.Table) -> dict[str, float]:
    """Return the number of failed samples in a rollout table by error name. Each sample counts by its own error."""
    counts = Counter(failure_name(error) for error in samples.column("error").to_pylist() if error is not None)
    return {f"failed/{name}": float(count) for name, count in sorted(counts.items())}


def failure_name(error: str) -> str:
    """Return the name of a sample's error: that of an exception or of a deadline, otherwise `REFUSED`."""
    named = _NAMED.match(error)
    return REFUSED if named is None else named[1]
