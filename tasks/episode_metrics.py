"""Metrics of samples whose code is recorded: what they asked of the policy and of tools, and what the world gave."""

from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc


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
