"""The groups with the highest number are trained on.

finished: by what their metadata has under `rollout.buffer_key`, or without that option by the `priority` that the
filter gave, or where it gave none by the standard deviation of their rewards, that is by how much a group-relative
advantage has to say; of one number as they came; unfinished: as they came, so that none waits for ever
"""

from collections.abc import Sequence

from cairn.configs.plugins import BadPlugin
from cairn.tasks.selecting.buffers.group import JudgedGroup


def order(groups: Sequence[JudgedGroup]) -> Sequence[JudgedGroup]:
    """Stable. Raises BadPlugin where the metadata has something else than a number."""
    return sorted(groups, key=lambda group: 0.0 if group.unfinished else -_priority(group))


def _priority(group: JudgedGroup) -> float:
    if group.key is None:
        found = group.std_reward if group.priority is None else group.priority
        return 0.0 if found is None else found
    if isinstance(group.key, bool) or not isinstance(group.key, int | float):
        raise BadPlugin(
            f"the buffer policy 'priority' needs numbers under rollout.buffer_key, and the metadata of group "
            f"{group.group_id} has {group.key!r} there: name another key, or correct the data"
        )
    return float(group.key)
