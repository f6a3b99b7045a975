"""The youngest groups are trained on, as close to the policy as can be; unfinished ones go on as long as they wait.

finished: by age, and of one age as they came; unfinished: as they came, so that none waits for ever
"""

from collections.abc import Sequence

from cairn.tasks.selecting.buffers.group import JudgedGroup


def order(groups: Sequence[JudgedGroup]) -> Sequence[JudgedGroup]:
    """Stable: groups of one age stay as they stand."""
    return sorted(groups, key=lambda group: 0 if group.unfinished else group.age)
