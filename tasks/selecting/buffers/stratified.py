"""Groups are trained on by turns, one of each stratum: the values that their metadata has under `rollout.buffer_key`.

finished: a turn takes the youngest group of each stratum that has one left, the strata in the order in which their
longest-waiting groups came; unfinished: as they came
"""

import json
from collections.abc import Sequence

from cairn.tasks.selecting.buffers import youngest_first
from cairn.tasks.selecting.buffers.group import JudgedGroup


def order(groups: Sequence[JudgedGroup]) -> Sequence[JudgedGroup]:
    """A group without the key is of a stratum of its own kind."""
    strata: dict[str, list[JudgedGroup]] = {}
    for group in groups:
        if not group.unfinished:
            strata.setdefault(json.dumps(group.key, sort_keys=True), []).append(group)
    queues = [list(youngest_first.order(stratum)) for stratum in strata.values()]
    turns = max(map(len, queues), default=0)
    dealt = [queue[turn] for turn in range(turns) for queue in queues if turn < len(queue)]
    return [*dealt, *(group for group in groups if group.unfinished)]
