"""Take groups from the strata in turn; a stratum is a value under `rollout.buffer_key` in the metadata.

finished: each turn takes the youngest remaining group of each stratum; the strata are in the order in which their first
groups arrived. unfinished: in order of arrival
"""

import json
from collections.abc import Sequence

from cairn.tasks.selecting.buffers import youngest_first
from cairn.tasks.selecting.buffers.group import JudgedGroup


def order(groups: Sequence[JudgedGroup]) -> Sequence[JudgedGroup]:
    """Order the groups. Groups without the key form a stratum of their own."""
    strata: dict[str, list[JudgedGroup]] = {}
    for group in groups:
        if not group.unfinished:
            strata.setdefault(json.dumps(group.key, sort_keys=True), []).append(group)
    queues = [list(youngest_first.order(stratum)) for stratum in strata.values()]
    turns = max(map(len, queues), default=0)
    dealt = [queue[turn] for turn in range(turns) for queue in queues if turn < len(queue)]
    return [*dealt, *(group for group in groups if group.unfinished)]
