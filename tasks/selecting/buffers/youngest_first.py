"""Train on the youngest groups first, which are closest to the policy.

finished: by age, those of equal age in order of arrival; unfinished: in order of arrival, so that none waits forever
"""

from collections.abc import Sequence

from cairn.tasks.selecting.buffers.group import JudgedGroup


def order(groups: Sequence[JudgedGroup]) -> Sequence[JudgedGroup]:
    """Order the groups. Groups of equal age keep their order."""
    return sorted(groups, key=lambda group: 0 if group.unfinished else group.age)
