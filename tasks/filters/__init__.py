"""Dynamic sampling: which groups are worth training on. One filter a file, `keep(rewards)` or `keep(samples)`."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cairn.configs.kinds import FILTER
from cairn.configs.plugins import BadPlugin
from cairn.tasks.filters.decision import Filter, FilterDecision
from cairn.tasks.filters.slime import judged

__all__ = ["Filter", "FilterDecision", "get_filter", "takes_samples"]


def get_filter(name: str | None) -> Filter:
    """The filter that `rollout.dynamic_sampling_filter` names; None keeps every group.

    One of the user's may say no more than whether a group is kept. Raises BadPlugin if there is none of that name, or
    if it takes other arguments; the filter does where it returns something else.
    """
    if name is None:
        return lambda given: FilterDecision(keep=True)
    decide = FILTER.load(name)
    if _written_for_slime(name, decide):
        return partial(judged, decide)

    def decision(given: Any) -> FilterDecision:
        found = decide(given)
        if isinstance(found, bool | np.bool_):
            return FilterDecision(bool(found), None if found else "not_kept")
        if not isinstance(found, FilterDecision):
            raise BadPlugin(
                f"the filter {name!r} returned {found!r}: let it return true, false or a cairn.FilterDecision"
            )
        return found

    return decision


def takes_samples(name: str | None) -> bool:
    """Whether a filter is given the samples of a group rather than their rewards: whether its argument is called
    `samples`, or it was written for slime. Raises as `get_filter`."""
    if name is None:
        return False
    function: Callable[..., Any] = FILTER.load(name)
    if _written_for_slime(name, function):
        return True
    try:
        return next(iter(inspect.signature(function).parameters)) == "samples"
    except ValueError:  # it is not written in Python
        return False


def _written_for_slime(name: str, function: Callable[..., Any]) -> bool:
    """Whether a filter takes `args` and `samples`: see `cairn.tasks.slime`."""
    return all(len(way) > 1 for way in FILTER.ways(name, function))
