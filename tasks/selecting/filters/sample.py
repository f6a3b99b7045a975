"""What a filter may see of a sample."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cairn.storage.store.canonical import from_json
from cairn.tasks.grading.shaping import as_graded

# What a filter says.


@dataclass(frozen=True)
class FilterDecision:
    """What is to become of a group. slime: `DynamicFilterOutput`."""

    keep: bool
    reason: str | None = None
    """Why it is dropped: counted under `dynamic_filter/drop_<reason>`."""
    keep_when_insufficient: bool = False
    """A dropped group that is still better than none, once the rounds of rollout are used up."""
    priority: float | None = None
    """What the buffer policy `priority` puts a kept group by, the highest first."""


Filter = Callable[[Any], FilterDecision]
"""`filter(rewards)`: the rewards, [G] float64, are those of one group, none of them failed; or `filter(samples)`: a
list of its `cairn.GradedSample`. A pure function: its answer is recorded once and never asked for again."""


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
)


@dataclass(frozen=True, eq=False)
class GradedSample:
    """One sample of a group of which none failed, as it was generated and graded."""

    group_id: int
    sample_index: int
    """Its place in the group, from 0."""
    reward: float
    """As graded, before the overlong penalty, which is among the components."""
    components: dict[str, Any]
    """What the grader recorded beside the reward."""
    response: str
    """As text, without special tokens; of several trajectories the last one."""
    response_ids: tuple[int, ...]
    """Tokens, the end token included; of all trajectories."""
    log_probs: tuple[float, ...]
    """Of these tokens, under the rollout engine."""
    loss_mask: tuple[int, ...]
    """1 for those that may be trained on."""
    finish_reason: str
    """`stop` or `length`."""
    status: str
    """`completed` or `truncated`: `cairn.storage.ledger.schemas.Status`."""
    prompt: str
    prompt_ids: tuple[int, ...]
    prompt_index: int
    """Row of the data set."""
    label: str | None
    metadata: dict[str, Any]
    """Of the data row; empty where it has none."""

    @property
    def length(self) -> int:
        """Tokens of the response."""
        return len(self.response_ids)

    @property
    def truncated(self) -> bool:
        """Whether the response was cut."""
        return self.finish_reason == "length"


def graded_samples(rollout: pa.Table, rewards: pa.Table) -> dict[int, list[GradedSample]]:
    """The samples of every group by its id, but of groups of which one has no reward.

    Args:
        rollout: with ROLLOUT_COLUMNS.
        rewards: a reward table, row for row of the same samples.
    """
    groups: dict[int, list[GradedSample]] = {}
    failed: set[int] = set()
    graded = zip(as_graded(rewards).to_pylist(), rewards.column("components").to_pylist(), strict=True)
    for row, (reward, components) in zip(rollout.to_pylist(), graded, strict=True):
        if reward is None:
            failed.add(row["group_id"])
            continue
        groups.setdefault(row["group_id"], []).append(_sample(row, reward, components))
    return {group_id: samples for group_id, samples in groups.items() if group_id not in failed}


def places(samples: Sequence[GradedSample]) -> dict[int, list[int]]:
    """The places in their groups of some samples, ascending, by the group's id."""
    found: dict[int, list[int]] = {}
    for sample in samples:
        found.setdefault(sample.group_id, []).append(sample.sample_index)
    return {group_id: sorted(own) for group_id, own in found.items()}


def _sample(row: dict[str, Any], reward: float, components: str | None) -> GradedSample:
    return GradedSample(
        group_id=row["group_id"],
        sample_index=row["sample_index"],
        reward=reward,
        components=from_json(components) if components else {},
        response=row["response_text"],
        response_ids=tuple(row["response_ids"]),
        log_probs=tuple(row["log_probs"]),
        loss_mask=tuple(row["loss_mask"]),
        finish_reason=row["finish_reason"],
        status=row["status"],
        prompt=row["prompt_text"],
        prompt_ids=tuple(row["prompt_ids"]),
        prompt_index=row["prompt_index"],
        label=row["label"],
        metadata=from_json(row["metadata"]) if row["metadata"] else {},
    )
