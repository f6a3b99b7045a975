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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger.schemas import RAW_REWARD, TRAJECTORY_REWARDS
from cairn.tasks.grading.worker import finite
from cairn.tasks.rewards.grader import Graded

# Rewards by their names, of a grader that gives several: numbers among what it returns, and `reward`, the sample's
# own, whatever `reward.reward_key` calls it.


SAMPLE_REWARD = "reward"
"""The name of the sample's own reward."""


def by_name(reward: float, components: Mapping[str, Any] | None) -> dict[str, Any]:
    """What was said of a sample, by its names."""
    return {**(components or {}), SAMPLE_REWARD: reward}


def is_number(value: Any) -> bool:
    """Whether a value is a reward: a finite number, or true or false."""
    if not isinstance(value, int | float):
        return False
    try:
        finite(value)
    except (ValueError, OverflowError):
        return False
    return True


def with_rewards(graded: Graded, keys: Collection[str], grader: str) -> Graded:
    """A graded sample; failed, where one of `keys` is no number among its components."""
    components = graded.components or {}
    missing = [key for key in keys if key != SAMPLE_REWARD and not is_number(components.get(key))]
    if graded.reward is None or not missing:
        return graded
    key, names = missing[0], ", ".join(map(repr, sorted(components))) or "nothing"
    said = f"{components[key]!r:.100} as {key!r}" if key in components else f"no {key!r}, but {names}"
    return replace(
        graded,
        reward=None,
        error=f"the grader {graded.grader or grader!r} gave {said} beside the reward, and algorithm.gdpo_reward_keys "
        f"names {key!r}: let it return a number under this name, or leave the name out",
    )


# Rewards of trajectories: what a grader says under `trajectory_rewards`, beside the sample's reward.


def with_own_rewards(graded: Graded, trajectories: int) -> tuple[Graded, Sequence[float] | None]:
    """A graded sample, and the rewards of its trajectories where the grader gave them; failed, where it gave others
    than one finite number each."""
    if graded.reward is None or TRAJECTORY_REWARDS.name not in (graded.components or {}):
        return graded, None
    components = dict(graded.components or {})
    given = components.pop(TRAJECTORY_REWARDS.name)
    try:
        rewards = [finite(reward) for reward in given]
    except (TypeError, ValueError):
        rewards = []
    if len(rewards) != trajectories:
        told = f"the grader gave {given!r} as {TRAJECTORY_REWARDS.name} of {trajectories} trajectories"
        return replace(graded, reward=None, error=f"{told}: let it give a list of one number each"), None
    return replace(graded, components=components or None), rewards


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
