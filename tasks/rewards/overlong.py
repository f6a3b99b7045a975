"""Soft overlong punishment: a reward falls as its response nears the longest length (Yu et al. 2025, "DAPO",
arXiv:2503.14476, equation 13).

Of a response of `l` sampled tokens, with L = `rollout.rollout_max_response_len`, b = `reward.overlong_buffer_len` and
f = `reward.overlong_penalty_factor`, it adds to the grader's reward

    0                     where l ≤ L − b
    f · ((L − b) − l)/b   where L − b < l ≤ L
    −f                    where l > L

as verl's `overlong_buffer` does. What tools and users said is no part of the length. The grader's own reward stays
beside it, as `raw_reward`, with `overlong_penalty`: filters, curricula and metrics go by that (the paper's equation 11
counts right answers), advantages by the shaped one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from cairn.configs.schema.run import RunConfig
from cairn.storage.schemas import RAW_REWARD
from cairn.tasks.rewards.pool import Graded

SHAPED = ("raw_reward", "overlong_penalty")
"""What stands beside a shaped reward, among the components."""


@dataclass(frozen=True)
class Overlong:
    """Lengths in tokens."""

    longest: int
    buffer: int
    factor: float

    @classmethod
    def of(cls, config: RunConfig) -> Self | None:
        """None where a run has none."""
        buffer = config.reward.overlong_buffer_len
        if buffer is None:
            return None
        return cls(config.rollout.rollout_max_response_len, buffer, config.reward.overlong_penalty_factor)

    def penalty(self, length: int) -> float:
        """What a response of this many sampled tokens is to have added."""
        beyond = min(max(0, length - (self.longest - self.buffer)), self.buffer)
        return -self.factor * beyond / self.buffer if beyond else 0.0

    def shaped(self, graded: Graded, length: int) -> Graded:
        """A graded sample with it; one without a reward as it is."""
        if graded.reward is None:
            return graded
        penalty = self.penalty(length)
        told = {**(graded.components or {}), **dict(zip(SHAPED, (graded.reward, penalty), strict=True))}
        return replace(graded, reward=graded.reward + penalty, components=told)


def as_graded(rewards: pa.Table) -> pa.ChunkedArray:
    """The rewards of a reward table as the grader gave them; null where there is none."""
    if RAW_REWARD.name not in rewards.column_names:
        return rewards.column("reward")
    return pc.coalesce(rewards.column(RAW_REWARD.name), rewards.column("reward"))


def sampled_tokens(length: int, segments: Sequence[Mapping[str, Any]] | None) -> int:
    """Tokens of a response of this many that the policy sampled, by its segments in a rollout table."""
    if segments is None:
        return length
    return sum(segment["tokens"] for segment in segments if segment["call"] is not None)
