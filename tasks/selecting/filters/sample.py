"""Input and output of a filter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cairn.storage.store.canonical import from_json
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
)


@dataclass(frozen=True, eq=False)
class GradedSample:
    """A generated and graded sample of a group without failed samples."""

    group_id: int
    sample_index: int
    """Position in the group, from 0."""
    reward: float
    """Reward before the overlong penalty, which is among the components."""
    components: dict[str, Any]
    """Components that the grader recorded with the reward."""
    response: str
    """Text without special tokens; of the last trajectory if there are several."""
    response_ids: tuple[int, ...]
    """Tokens of all trajectories, the end token included."""
    log_probs: tuple[float, ...]
    """Log-probs of these tokens under the rollout engine."""
    loss_mask: tuple[int, ...]
    """1 at tokens that may be trained on, else 0."""
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
    """Metadata of the data row; empty where it has none."""

    @property
    def length(self) -> int:
        """Number of tokens of the response."""
        return len(self.response_ids)

    @property
    def truncated(self) -> bool:
        """Whether the response was cut off."""
        return self.finish_reason == "length"


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
        groups.setdefault(row["group_id"], []).append(_sample(row, reward, components))
    return {group_id: samples for group_id, samples in groups.items() if group_id not in failed}


def places(samples: Sequence[GradedSample]) -> dict[int, list[int]]:
    """Return the positions of some samples in their groups, ascending, by the group's id."""
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
