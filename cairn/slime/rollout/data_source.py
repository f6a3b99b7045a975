"""Data sources: see `cairn.tasks.slime`."""

from typing import Any

from cairn.tasks.slime import DataSource as DataSource
from cairn.tasks.slime import RolloutDataSource as RolloutDataSource
from cairn.tasks.slime import RolloutDataSourceWithBuffer as RolloutDataSourceWithBuffer


def pop_first(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    """Take the first groups out of a buffer."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken
