"""Train on the groups with the highest priority first.

finished: by the value under `rollout.buffer_key` in their metadata; without that option by the filter's `priority`;
without a priority by the standard deviation of their rewards, which measures how much a group-relative advantage can
teach. Those of equal priority are in order of arrival. unfinished: in order of arrival, so that none waits forever
"""

from collections.abc import Sequence

from cairn.configs.plugins import BadPlugin
from cairn.tasks.selecting.buffers.group import JudgedGroup


def order(groups: Sequence[JudgedGroup]) -> Sequence[JudgedGroup]:
    """Order the groups. Those of equal priority keep their order. Raises BadPlugin where a value in the metadata is no
    number."""
    return sorted(groups, key=lambda group: 0.0 if group.unfinished else -_priority(group))


def _priority(group: JudgedGroup) -> float:
    if group.key is None:
        priority = group.std_reward if group.priority is None else group.priority
        return 0.0 if priority is None else priority
    if isinstance(group.key, bool) or not isinstance(group.key, int | float):
        raise BadPlugin(
            f"the buffer policy 'priority' needs numbers under rollout.buffer_key, but the metadata of group "
            f"{group.group_id} has {group.key!r} there: name another key, or correct the data"
        )
    return float(group.key)
