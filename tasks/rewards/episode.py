"""The reward that the run's generate function gave, as of an environment: that of the sample's last trajectory.

Each of several trajectories keeps the one that it was given; one that was given none has the last one's. Where the last
one has none, the sample has failed.
"""

from typing import Any

from cairn.tasks.rewards.sample import Sample


def grade(sample: Sample) -> dict[str, Any]:
    """The last trajectory's reward, and each one's. ValueError without one."""
    last = sample.rewards[-1] if sample.rewards else None
    if last is None:
        raise ValueError("generate gave the sample no reward: let its last trajectory, or a segment of it, have one")
    own = [last if reward is None else reward for reward in sample.rewards]
    return {"reward": last} if len(own) == 1 else {"reward": last, "trajectory_rewards": own}
