"""The oldest groups are trained on, while `rollout.max_age` allows it: nothing that was paid for is wasted.

finished: the oldest first, and of one age as they came; unfinished: as they came
"""

from collections.abc import Sequence

from cairn.tasks.selecting.buffers.group import JudgedGroup


def order(groups: Sequence[JudgedGroup]) -> Sequence[JudgedGroup]:
    """Stable: groups of one age stay as they stand."""
    return sorted(groups, key=lambda group: 0 if group.unfinished else -group.age)
