"""Rewards and roles that user code gives trajectories and their segments while it generates."""

import re
from collections.abc import Sequence
from math import isfinite
from numbers import Real

import numpy as np

from cairn.engines.trajectories import BadTrajectory, Segment, Trajectory


def checked_reward(reward: object, of: str) -> float | None:
    """A reward of a segment or a trajectory. Raises BadTrajectory for what is no number; ValueError, with which the
    sample fails, for one that is not finite: it may be the world's."""
    if reward is None:
        return None
    if not isinstance(reward, np.bool_ | Real):
        raise BadTrajectory(f"generate gave {of} the reward {reward!r}; it has to be a number")
    if not isfinite(reward):
        raise ValueError(f"gave {of} the reward {reward}, which is not finite")
    return float(reward)


def reward_of(trajectory: Trajectory, segments: Sequence[Segment]) -> float | None:
    """Of a trajectory, whose segments are checked: its own, or else the sum of theirs. Raises as `checked_reward`."""
    turns = [segment.reward for segment in segments if segment.reward is not None]
    return (
        checked_reward(trajectory.reward, "a trajectory") if trajectory.reward is not None or not turns else sum(turns)
    )


def checked_role(role: object) -> str | None:
    """Of a trajectory. Raises BadTrajectory for what is no word."""
    if role is None or (isinstance(role, str) and re.fullmatch(r"[\w.-]+", role)):
        return role
    raise BadTrajectory(f"generate gave a trajectory the role {role!r}; it has to be a word, such as 'solver'")
