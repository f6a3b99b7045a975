"""Dynamic sampling: which groups are worth training on. One filter a file, `keep(rewards)` or `keep(samples)`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from cairn.configs.kinds import FILTER
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.run import RunConfig
from cairn.configs.slime import values_read
from cairn.tasks import slime
from cairn.tasks.grading.graded import GradedSample
from cairn.tasks.selecting.filters.sample import Filter, FilterDecision

# Filters written for slime: see `cairn.tasks.slime`.


def slime_sample(sample: GradedSample, group_size: int, reward_key: str | None = None) -> slime.GroupSample:
    """Return a sample as functions written for slime get it. `reward_key`: entry of the reward, which is a mapping
    then, as the grader returned it."""
    reward: Any = sample.reward
    if reward_key is not None and sample.components:
        reward = {**sample.components, reward_key: sample.reward}
    found = slime.GroupSample(
        group_index=sample.group_id,
        index=sample.group_id * group_size + sample.sample_index,
        loss_mask=list(sample.loss_mask),
    )
    vars(found).update(vars(slime.to_grade(sample)), reward=reward)
    return found


def decision_of_slime_filter(
    keep: Callable[..., Any], args: Mapping[str, Any], samples: Sequence[GradedSample]
) -> FilterDecision:
    """Return the decision of a filter written for slime about a group. Raises BadPlugin where it returns something
    else."""
    key = args.get("reward_key")
    returned = keep(slime.Arguments(args), [slime_sample(sample, len(samples), key) for sample in samples])
    output = returned if hasattr(returned, "keep") else slime.DynamicFilterOutput(returned)
    kept, reason = bool(output.keep), getattr(output, "reason", None)
    if reason is not None and not isinstance(reason, str):
        raise BadPlugin(f"the filter returned {reason!r} as the reason: let it be text")
    spare = bool(getattr(output, "keep_when_insufficient", False))
    return FilterDecision(kept, None if kept else reason or "not_kept", keep_when_insufficient=spare and not kept)


__all__ = ["Filter", "FilterDecision", "get_filter", "takes_samples"]


def get_filter(name: str | None, config: RunConfig | None = None) -> Filter:
    """Return the filter that `rollout.dynamic_sampling_filter` names; None keeps every group. `config` has the values
    for a filter written for slime.

    A user's filter may return only whether to keep a group. Raises BadPlugin if no filter has that name, or if it takes
    other arguments. The filter raises it where it returns something else.
    """
    if name is None:
        return lambda group: FilterDecision(keep=True)
    decide = FILTER.load(name)
    if _written_for_slime(name, decide):
        return partial(decision_of_slime_filter, decide, {} if config is None else values_read(config, decide))

    def decision(group: Any) -> FilterDecision:
        returned = decide(group)
        if isinstance(returned, bool | np.bool_):
            return FilterDecision(bool(returned), None if returned else "not_kept")
        if not isinstance(returned, FilterDecision):
            raise BadPlugin(
                f"the filter {name!r} returned {returned!r}: let it return true, false or a cairn.FilterDecision"
            )
        return returned

    return decision


def takes_samples(name: str | None) -> bool:
    """Whether a filter takes the samples of a group rather than their rewards: its argument is called `samples`, or it
    was written for slime. Raises as `get_filter`."""
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
    return all(len(way) > 1 for way in FILTER.signatures_of(name, function))
