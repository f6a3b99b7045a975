"""What is compared with what, where samples have several trajectories, or roles.

| a sample | stands in the batch as | in the group of |
|---|---|---|
| of one trajectory | itself | its role, among the samples of its prompt |
| of several, with one reward | one response, the trajectories in their order | those without a role |
| of several, each with a reward (`trajectory_rewards`) | as many responses | the role of each |

So baselines are taken over all trajectories of one role that a prompt has, of whatever samples, and no estimator need
know of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from cairn.engines.types import FinishReason
from cairn.tasks.advantages.batch import ScoredBatch, Turn

Segments = Sequence[dict[str, Any]]
"""Of a row of the rollout table."""


@dataclass(frozen=True)
class Episodes:
    """What of N samples is more than a response: each field has an entry a sample, as the tables have it."""

    lengths: Sequence[Sequence[int] | None]
    """Tokens of each of several trajectories."""
    rewards: Sequence[Sequence[float] | None]
    """Of each trajectory, where they have rewards of their own."""
    roles: Sequence[Sequence[str | None] | None]
    segments: Sequence[Segments | None]
    turn_rewards: Sequence[Sequence[float | None] | None]

    def turns(self, totals: Sequence[int]) -> list[list[Turn]]:
        """Of each sample, which has so many tokens."""
        return [_turns(*one) for one in zip(self.segments, self.turn_rewards, totals, strict=True)]


@dataclass(frozen=True)
class _Unit:
    """What is compared: a sample, or a trajectory of one."""

    sample: int
    start: int
    end: int
    reward: float
    role: str | None
    truncated: bool


@dataclass(frozen=True)
class Compared:
    """A batch in which each of what is compared is a sample."""

    batch: ScoredBatch
    roles: Sequence[str | None]
    """Of each of its samples."""
    _order: np.ndarray | None
    """Its samples in the order of the tokens of the batch that it was made of; None: it is that batch."""
    _counts: Sequence[int]
    """How many each sample of that batch has become."""

    def of_samples(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """[T_i] of each of its samples → of each sample of the batch that it was made of."""
        if self._order is None:
            return list(values)
        ordered = [values[place] for place in self._order]
        return [np.concatenate(ordered[start:end]) for start, end in pairwise([0, *accumulate(self._counts)])]


def compared(batch: ScoredBatch, episodes: Episodes) -> Compared:
    """The batch as estimators are given it."""
    groups = list[list[_Unit]]()
    for group in batch.groups:
        by_role: dict[str | None, list[_Unit]] = {}
        for sample in range(group.start, group.stop):
            for unit in _units(batch, episodes, sample):
                by_role.setdefault(unit.role, []).append(unit)
        groups += by_role.values()
    units = [unit for group in groups for unit in group]
    sizes, counts = list(map(len, groups)), np.bincount([unit.sample for unit in units], minlength=len(batch)).tolist()
    roles = [unit.role for unit in units]
    if sizes == list(batch.group_sizes) and counts == [1] * len(batch):
        return Compared(replace(batch, rewards=_rewards(batch, units)), roles, None, counts)
    order = np.array(sorted(range(len(units)), key=lambda place: (units[place].sample, units[place].start)))
    cut = {
        field.name: [value[unit.sample][unit.start : unit.end] for unit in units]
        for field in fields(batch)
        if field.name in _OF_TOKENS and (value := getattr(batch, field.name)) is not None
    }
    turns = None if batch.turns is None else [_within(batch.turns[unit.sample], unit) for unit in units]
    made = replace(
        batch,
        rewards=_rewards(batch, units),
        group_sizes=sizes,
        truncated=np.array([unit.truncated for unit in units]),
        turns=turns,
        **cut,
    )
    return Compared(made, roles, order, counts)


_OF_TOKENS = (
    "loss_masks",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "values",
    "kl",
)
"""Fields of a batch with an array [T_i] for each sample."""


def _rewards(batch: ScoredBatch, units: Sequence[_Unit]) -> np.ndarray:
    return np.array([unit.reward for unit in units], batch.rewards.dtype)


def _units(batch: ScoredBatch, episodes: Episodes, sample: int) -> list[_Unit]:
    lengths, rewards, roles = episodes.lengths[sample], episodes.rewards[sample], episodes.roles[sample]
    total, truncated = len(batch.loss_masks[sample]), batch.truncated is not None and bool(batch.truncated[sample])
    if lengths is None or len(lengths) == 1:
        reward = float(batch.rewards[sample]) if rewards is None else rewards[0]
        return [_Unit(sample, 0, total, reward, None if roles is None else roles[0], truncated)]
    if rewards is None:
        return [_Unit(sample, 0, total, float(batch.rewards[sample]), None, truncated)]
    spans = list(pairwise([0, *accumulate(lengths)]))
    segments, own_roles = episodes.segments[sample] or (), roles or [None] * len(spans)
    return [
        _Unit(sample, start, end, reward, role, _finish_reason(segments, start, end) == FinishReason.LENGTH)
        for (start, end), reward, role in zip(spans, rewards, own_roles, strict=True)
    ]


def _finish_reason(segments: Segments, start: int, end: int) -> str | None:
    """Of the last segment that was sampled within a span."""
    ends = accumulate(segment["tokens"] for segment in segments)
    within = [
        one["finish_reason"] for one, last in zip(segments, ends, strict=True) if start < last <= end and one["call"]
    ]
    return within[-1] if within else None


def _turns(segments: Segments | None, rewards: Sequence[float | None] | None, total: int) -> list[Turn]:
    if segments is None:
        return [Turn(0, total, rewards[0] if rewards else None)] if total else []
    spans = pairwise([0, *accumulate(segment["tokens"] for segment in segments)])
    given = rewards or [None] * len(segments)
    return [
        Turn(*span, reward)
        for segment, span, reward in zip(segments, spans, given, strict=True)
        if segment["call"] is not None and span[0] < span[1]
    ]


def _within(turns: Sequence[Turn], unit: _Unit) -> list[Turn]:
    return [
        Turn(turn.start - unit.start, turn.end - unit.start, turn.reward)
        for turn in turns
        if unit.start <= turn.start and turn.end <= unit.end
    ]
