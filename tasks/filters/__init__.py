"""Dynamic sampling: which groups are worth training on. One filter a file."""

import inspect

import numpy as np

from cairn.tasks.filters.decision import Filter, FilterDecision
from cairn.tasks.filters.nonzero_std import check_reward_nonzero_std, check_reward_nonzero_std_with_fallback
from cairn.tasks.plugins import BadPlugin, deferred, load_callable

__all__ = ["Filter", "FilterDecision", "get_filter"]

BUILT_IN: dict[str, Filter] = {
    "check_reward_nonzero_std": check_reward_nonzero_std,
    "check_reward_nonzero_std_with_fallback": check_reward_nonzero_std_with_fallback,
}


def get_filter(name: str | None) -> Filter:
    """The filter that `rollout.dynamic_sampling_filter` names; None keeps every group.

    Raises BadPlugin if there is none of that name, or if it takes other arguments; the filter does where it returns
    something else.
    """
    if name is None:
        return lambda rewards: FilterDecision(keep=True)
    if name in BUILT_IN:
        return BUILT_IN[name]
    if "." not in name:
        known = ", ".join(BUILT_IN)
        raise BadPlugin(f"there is no filter {name!r}: use one of {known}, package.module.function or file.py:function")
    return _own(name)


def _own(name: str) -> Filter:
    """A filter of the user's, which may say no more than whether a group is kept."""
    decide = load_callable(name)
    try:
        inspect.signature(decide).bind(None)
        takes_one = deferred(decide) is None
    except TypeError:
        takes_one = False
    except ValueError:  # it is not written in Python
        takes_one = True
    if not takes_one:
        raise BadPlugin(f"the filter {name!r}: let it take one array of rewards and return its decision")

    def decision(rewards: np.ndarray) -> FilterDecision:
        found = decide(rewards)
        if isinstance(found, bool | np.bool_):
            return FilterDecision(bool(found), None if found else "not_kept")
        if not isinstance(found, FilterDecision):
            raise BadPlugin(
                f"the filter {name!r} returned {found!r}: let it return true, false or a "
                "cairn.tasks.filters.FilterDecision"
            )
        return found

    return decision
