"""The reward that the run's generate function returned, for example from an environment: that of the sample's last
trajectory.

Each of several trajectories keeps its own reward. A trajectory without one has the last trajectory's. Where the last
trajectory has none, the sample fails.
"""

from typing import Any

from cairn.tasks.rewards.sample import Sample


def grade(sample: Sample) -> dict[str, Any]:
    """Return the last trajectory's reward, and each trajectory's. Raises ValueError where the last one has none."""
    last = sample.rewards[-1] if sample.rewards else None
    if last is None:
        raise ValueError("generate set no reward: set one on the sample's last trajectory, or on a segment of it")
    own = [last if reward is None else reward for reward in sample.rewards]
    return {"reward": last} if len(own) == 1 else {"reward": last, "trajectory_rewards": own}
