"""Dynamic sampling: which groups are worth training on. One filter a file, `keep(rewards) -> FilterDecision`."""

import numpy as np

from cairn.configs.kinds import FILTER
from cairn.configs.plugins import BadPlugin
from cairn.tasks.filters.decision import Filter, FilterDecision

__all__ = ["Filter", "FilterDecision", "get_filter"]


def get_filter(name: str | None) -> Filter:
    """The filter that `rollout.dynamic_sampling_filter` names; None keeps every group.

    One of the user's may say no more than whether a group is kept. Raises BadPlugin if there is none of that name, or
    if it takes other arguments; the filter does where it returns something else.
    """
    if name is None:
        return lambda rewards: FilterDecision(keep=True)
    decide = FILTER.load(name)

    def decision(rewards: np.ndarray) -> FilterDecision:
        found = decide(rewards)
        if isinstance(found, bool | np.bool_):
            return FilterDecision(bool(found), None if found else "not_kept")
        if not isinstance(found, FilterDecision):
            raise BadPlugin(
                f"the filter {name!r} returned {found!r}: let it return true, false or a cairn.FilterDecision"
            )
        return found

    return decision
