"""Soft overlong punishment: the reward falls as a response approaches the length limit (Yu et al. 2025, "DAPO",
arXiv:2503.14476, equation 13).

With `l` sampled tokens in a response, L = `rollout.rollout_max_response_len`, b = `reward.overlong_buffer_len` and f =
`reward.overlong_penalty_factor`, the grader's reward is changed by

    0                     where l ≤ L − b
    f · ((L − b) − l)/b   where L − b < l ≤ L
    −f                    where l > L

as in verl's `overlong_buffer`. Tokens of tools and users do not count in the length. The grader's own reward is
recorded as `raw_reward`, next to `overlong_penalty`. Filters, curricula and metrics use the raw reward (the paper's
equation 11 counts right answers); advantages use the shaped one.
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

# Rewards by name, of a grader that returns several: the numbers among its components, and `reward`, the sample's own,
# whatever `reward.reward_key` calls it.


SAMPLE_REWARD = "reward"
"""Name of the sample's own reward."""


def by_name(reward: float, components: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the reward and the components of a sample, by name."""
    return {**(components or {}), SAMPLE_REWARD: reward}


def is_number(value: Any) -> bool:
    """Whether a value is a reward: a finite number, or true or false."""
    if not isinstance(value, int | float):
        return False
    try:
        finite(value)
    except (TypeError, ValueError):
        return False
    return True


def with_rewards(graded: Graded, keys: Collection[str], grader: str) -> Graded:
    """Return a graded sample; it fails where one of `keys` is no number among its components."""
    components = graded.components or {}
    missing = [key for key in keys if key != SAMPLE_REWARD and not is_number(components.get(key))]
    if graded.reward is None or not missing:
        return graded
    key, names = missing[0], ", ".join(map(repr, sorted(components))) or "nothing"
    returned = f"{components[key]!r:.100} as {key!r}" if key in components else f"no {key!r}, but {names}"
    return replace(
        graded,
        reward=None,
        error=f"the grader {graded.grader or grader!r} returned {returned} with the reward, but "
        f"algorithm.gdpo_reward_keys names {key!r}: let it return a number under this name, or leave the name out",
    )


# Rewards of trajectories: what a grader returns under `trajectory_rewards`, next to the sample's reward.


def with_own_rewards(graded: Graded, trajectories: int) -> tuple[Graded, Sequence[float] | None]:
    """Return a graded sample, and the rewards of its trajectories where the grader returned them.

    The sample fails where these are not one finite number a trajectory.
    """
    if graded.reward is None or TRAJECTORY_REWARDS.name not in (graded.components or {}):
        return graded, None
    components = dict(graded.components or {})
    returned = components.pop(TRAJECTORY_REWARDS.name)
    try:
        rewards = [finite(reward) for reward in returned]
    except (TypeError, ValueError):
        rewards = []
    if len(rewards) != trajectories:
        problem = f"the grader returned {returned!r} as {TRAJECTORY_REWARDS.name} of {trajectories} trajectories"
        return replace(graded, reward=None, error=f"{problem}: let it return a list with one number for each"), None
    return replace(graded, components=components or None), rewards


SHAPED = ("raw_reward", "overlong_penalty")
"""Components that shaping adds."""


@dataclass(frozen=True)
class Overlong:
    """Parameters of the overlong penalty; lengths in tokens."""

    longest: int
    buffer: int
    factor: float

    @classmethod
    def of(cls, config: RunConfig) -> Self | None:
        """Return the penalty of a run; None where it has none."""
        buffer = config.reward.overlong_buffer_len
        if buffer is None:
            return None
        return cls(config.rollout.rollout_max_response_len, buffer, config.reward.overlong_penalty_factor)

    def penalty(self, length: int) -> float:
        """Return the penalty, 0 or negative, for a response of `length` sampled tokens."""
        beyond = min(max(0, length - (self.longest - self.buffer)), self.buffer)
        return -self.factor * beyond / self.buffer if beyond else 0.0

    def shaped(self, graded: Graded, length: int) -> Graded:
        """Return a graded sample with the penalty; one without a reward is unchanged."""
        if graded.reward is None:
            return graded
        penalty = self.penalty(length)
        components = {**(graded.components or {}), **dict(zip(SHAPED, (graded.reward, penalty), strict=True))}
        return replace(graded, reward=graded.reward + penalty, components=components)


def as_graded(rewards: pa.Table) -> pa.ChunkedArray:
    """Return the rewards of a reward table as the grader returned them; null where there is none."""
    if RAW_REWARD.name not in rewards.column_names:
        return rewards.column("reward")
    return pc.coalesce(rewards.column(RAW_REWARD.name), rewards.column("reward"))


def sampled_tokens(length: int, segments: Sequence[Mapping[str, Any]] | None) -> int:
    """Return how many of a response's `length` tokens the policy sampled, by its segments in a rollout table."""
    if segments is None:
        return length
    return sum(segment["tokens"] for segment in segments if segment["call"] is not None)
