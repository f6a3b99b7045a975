"""Train on the oldest groups first, while `rollout.max_age` allows it, so that no generated group is wasted.

finished: the oldest first, those of equal age in order of arrival; unfinished: in order of arrival
"""

from collections.abc import Sequence

from cairn.tasks.selecting.buffers.group import JudgedGroup


def order(groups: Sequence[JudgedGroup]) -> Sequence[JudgedGroup]:
    """Order the groups. Groups of equal age keep their order."""
    return sorted(groups, key=lambda group: 0 if group.unfinished else -group.age)
