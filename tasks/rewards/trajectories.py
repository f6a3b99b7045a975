"""Rewards of trajectories: what a grader says under `trajectory_rewards`, beside the sample's reward."""

from collections.abc import Sequence
from dataclasses import replace

from cairn.storage.schemas import TRAJECTORY_REWARDS
from cairn.tasks.rewards.pool import Graded
from cairn.tasks.rewards.worker import finite


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
