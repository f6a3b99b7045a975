"""What is compared with what, where samples have several trajectories, or roles.

A reward belongs to a sample, and so do its baseline and its weight in the group:

| where, of a prompt | is compared |
|---|---|
| each sample has one reward | sample with sample, whatever their trajectories and roles |
| a sample has trajectories of different rewards | trajectory with trajectory of the same role |
| the estimator goes by `components`, which a sample has one of | sample with sample |

In the second case those trajectories of a sample that share a role and a reward are one response, and all of a sample's
responses count as one sample (`ScoredBatch.siblings`). So an estimator sees a batch of responses, each with one reward,
and no sample's advantage depends on how many trajectories another one went through.
"""

from collections.abc import Iterator, Sequence
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

    def role_rewards(self, rewards: Sequence[float]) -> dict[str, float]:
        """Mean reward of each role: over the samples that have it, of the mean over a sample's trajectories of it.

        Args:
            rewards: of each sample, which its trajectories have where they have none of their own.
        """
        found = dict[str, list[float]]()
        for shared, given, roles in zip(rewards, self.rewards, self.roles, strict=True):
            own = np.array(given or [shared] * len(roles or ()), np.float64)
            for role in dict.fromkeys(roles or ()):
                if role is not None:
                    found.setdefault(role, []).append(float(own[[one == role for one in roles or ()]].mean()))
        return {role: float(np.mean(means)) for role, means in sorted(found.items())}

    def turns(self, totals: Sequence[int]) -> list[list[Turn]]:
        """Of each sample, which has so many tokens."""
        return [_turns(*one) for one in zip(self.segments, self.turn_rewards, totals, strict=True)]


Span = tuple[int, int]
"""First token, and the one behind the last, of a sample's response."""


@dataclass(frozen=True)
class _Unit:
    """What is compared: a sample, or those trajectories of one that share a role and a reward."""

    sample: int
    spans: Sequence[Span]
    reward: float
    truncated: bool

    def of(self, values: np.ndarray) -> np.ndarray:
        """[T] of the sample's tokens → those of this unit."""
        return np.concatenate([values[start:end] for start, end in self.spans])


@dataclass(frozen=True)
class Compared:
    """A batch in which each of what is compared is a sample."""

    batch: ScoredBatch
    _units: Sequence[_Unit] | None
    """Its samples; None: they are those of the batch that it was made of."""
    _lengths: Sequence[int]
    """Tokens of each sample of that batch."""

    def of_samples(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """[T_i] of each of its samples → of each sample of the batch that it was made of."""
        if self._units is None:
            return list(values)
        found = [np.zeros(length, values[0].dtype) for length in self._lengths]
        for unit, own in zip(self._units, values, strict=True):
            ends = list(accumulate(end - start for start, end in unit.spans))
            for (start, end), part in zip(unit.spans, np.split(own, ends[:-1]), strict=True):
                found[unit.sample][start:end] = part
        return found


def compared(batch: ScoredBatch, episodes: Episodes) -> Compared:
    """The batch as estimators are given it."""
    groups = [units for group in batch.groups for units in _compared_units(batch, episodes, group)]
    units, sizes = [unit for group in groups for unit in group], list(map(len, groups))
    lengths = list(map(len, batch.loss_masks))
    rewards = np.array([unit.reward for unit in units], batch.rewards.dtype)
    if sizes == list(batch.group_sizes) and all(unit.spans == [(0, lengths[unit.sample])] for unit in units):
        return Compared(replace(batch, rewards=rewards), None, lengths)
    cut: dict[str, Any] = {
        field.name: [unit.of(value[unit.sample]) for unit in units]
        for field in fields(batch)
        if field.name in _OF_TOKENS and (value := getattr(batch, field.name)) is not None
    }
    turns = None if batch.turns is None else [_within(batch.turns[unit.sample], unit) for unit in units]
    truncated = np.array([unit.truncated for unit in units])
    siblings = np.array([unit.sample for unit in units])
    made = replace(
        batch, rewards=rewards, group_sizes=sizes, truncated=truncated, turns=turns, siblings=siblings, **cut
    )
    return Compared(made, units, lengths)


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


def _compared_units(batch: ScoredBatch, episodes: Episodes, group: slice) -> list[list[_Unit]]:
    """The units of a prompt's samples, those that are compared with each other together."""
    samples = range(group.start, group.stop)
    differ = any(len(set(episodes.rewards[sample] or ())) > 1 for sample in samples)
    if batch.components is not None or not differ:
        return [[_whole(batch, episodes, sample) for sample in samples]]
    by_role: dict[str | None, list[_Unit]] = {}
    for sample in samples:
        for role, unit in _parts(batch, episodes, sample):
            by_role.setdefault(role, []).append(unit)
    return list(by_role.values())


def _whole(batch: ScoredBatch, episodes: Episodes, sample: int) -> _Unit:
    own = set(episodes.rewards[sample] or ())
    reward = own.pop() if len(own) == 1 else float(batch.rewards[sample])
    truncated = batch.truncated is not None and bool(batch.truncated[sample])
    return _Unit(sample, [(0, len(batch.loss_masks[sample]))], reward, truncated)


def _parts(batch: ScoredBatch, episodes: Episodes, sample: int) -> Iterator[tuple[str | None, _Unit]]:
    """The units of a sample with their roles, in the order of their first trajectories."""
    lengths, whole = episodes.lengths[sample], _whole(batch, episodes, sample)
    count = 1 if lengths is None else len(lengths)
    roles = episodes.roles[sample] or [None] * count
    if lengths is None or count == 1:
        yield roles[0], whole
        return
    rewards = episodes.rewards[sample] or [whole.reward] * count
    spans: dict[tuple[str | None, float], list[Span]] = {}
    for role, reward, span in zip(roles, rewards, pairwise([0, *accumulate(lengths)]), strict=True):
        spans.setdefault((role, reward), []).append(span)
    segments = episodes.segments[sample] or ()
    for (role, reward), own in spans.items():
        yield role, _Unit(sample, own, reward, _finish_reason(segments, *own[-1]) == FinishReason.LENGTH)


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
    found, before = list[Turn](), 0
    for start, end in unit.spans:
        moved = before - start
        found += [
            Turn(turn.start + moved, turn.end + moved, turn.reward)
            for turn in turns
            if start <= turn.start and turn.end <= end
        ]
        before += end - start
    return found
