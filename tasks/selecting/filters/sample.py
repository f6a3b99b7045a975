"""Input and output of a filter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cairn.storage.ledger.schemas import TRAJECTORY_INFOS
from cairn.tasks.grading.graded import GradedSample
from cairn.tasks.grading.shaping import as_graded


@dataclass(frozen=True)
class FilterDecision:
    """Decision of a filter on a group. slime: `DynamicFilterOutput`."""

    keep: bool
    reason: str | None = None
    """Reason for dropping the group, counted under `dynamic_filter/drop_<reason>`."""
    keep_when_insufficient: bool = False
    """Whether a dropped group is still better than none, once the rounds of rollout are used up."""
    priority: float | None = None
    """Number by which the buffer policy `priority` orders kept groups, the highest first."""


Filter = Callable[[Any], FilterDecision]
"""`filter(rewards)`, with the rewards of one group, [G] float64, none of them failed; or `filter(samples)`, with a list
of its `cairn.GradedSample`. A pure function, whose result is recorded once."""


ROLLOUT_COLUMNS = (
    "group_id",
    "sample_index",
    "prompt_index",
    "prompt_text",
    "prompt_ids",
    "response_text",
    "response_ids",
    "log_probs",
    "loss_mask",
    "finish_reason",
    "status",
    "label",
    "metadata",
    TRAJECTORY_INFOS.name,
)


def graded_samples(rollout: pa.Table, rewards: pa.Table) -> dict[int, list[GradedSample]]:
    """Return the samples of every group, by the group's id, without groups in which a sample has no reward.

    Args:
        rollout: a table with ROLLOUT_COLUMNS.
        rewards: the reward table of the same samples, in the same order.
    """
    groups: dict[int, list[GradedSample]] = {}
    failed: set[int] = set()
    graded = zip(as_graded(rewards).to_pylist(), rewards.column("components").to_pylist(), strict=True)
    for row, (reward, components) in zip(rollout.to_pylist(), graded, strict=True):
        if reward is None:
            failed.add(row["group_id"])
            continue
        sample = GradedSample.of(row | {"reward": reward, "components": components})
        groups.setdefault(sample.group_id, []).append(sample)
    return {group_id: samples for group_id, samples in groups.items() if group_id not in failed}
