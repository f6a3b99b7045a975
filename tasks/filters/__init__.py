"""Dynamic sampling: which groups are worth training on. One filter a file."""

from tasks.filters.decision import Filter, FilterDecision
from tasks.filters.nonzero_std import check_reward_nonzero_std, check_reward_nonzero_std_with_fallback
from tasks.plugins import BadPlugin, load_callable

__all__ = ["Filter", "FilterDecision", "get_filter"]

BUILT_IN: dict[str, Filter] = {
    "check_reward_nonzero_std": check_reward_nonzero_std,
    "check_reward_nonzero_std_with_fallback": check_reward_nonzero_std_with_fallback,
}


def get_filter(name: str | None) -> Filter:
    """The filter that `rollout.dynamic_sampling_filter` names; None keeps every group.

    Raises BadPlugin if there is none of that name.
    """
    if name is None:
        return lambda rewards: FilterDecision(keep=True)
    if name in BUILT_IN:
        return BUILT_IN[name]
    if "." not in name:
        known = ", ".join(BUILT_IN)
        raise BadPlugin(f"there is no filter {name!r}: use one of {known}, package.module.function or file.py:function")
    return load_callable(name)
