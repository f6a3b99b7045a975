"""Data sources: see `cairn.tasks.data.slime_source`."""

from typing import Any

from cairn.tasks.data.slime_source import DataSource as DataSource
from cairn.tasks.data.slime_source import RolloutDataSource as RolloutDataSource
from cairn.tasks.data.slime_source import RolloutDataSourceWithBuffer as RolloutDataSourceWithBuffer


def pop_first(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    """Take the first groups out of a buffer."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken
