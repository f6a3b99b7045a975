"""Samples of a full batch that are not trained on, though their rewards count in the baselines of their groups. One
filter a file, `remove(groups) -> samples`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from cairn.configs.errors import Failure
from cairn.configs.kinds import SAMPLE_FILTER, written_for_slime
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.run import RunConfig
from cairn.configs.slime import values_read
from cairn.tasks import slime
from cairn.tasks.grading.graded import GradedSample
from cairn.tasks.selecting.filters import slime_sample


class NothingLeft(Failure):
    """Nothing is left to train on, of a batch or of one of its optimizer steps."""


def removed_by(
    name: str, groups: Sequence[Sequence[GradedSample]], config: RunConfig | None = None
) -> dict[int, list[int]]:
    """Return the samples of a batch that `rollout.rollout_sample_filter_path` removes: positions in their groups,
    ascending, by the group's id. `config` has the values for a filter written for slime.

    Raises:
        BadPlugin: the filter is not available, takes other arguments, or returns anything else than samples of the
            batch.
        NothingLeft: it removes all samples.
    """
    function = SAMPLE_FILTER.load(name)
    if written_for_slime(function):
        returned = _marked(function, {} if config is None else values_read(config, function), groups)
    else:
        returned = function([list(group) for group in groups])
    removed = list(returned) if isinstance(returned, Iterable) else None
    batch_samples = {id(sample) for group in groups for sample in group}
    if removed is None or not batch_samples.issuperset(map(id, removed)):
        raise BadPlugin(
            f"the sample filter {name!r} returned something else than samples that it received: let it return those "
            "that must not be trained on"
        )
    removed = list({id(sample): sample for sample in removed}.values())
    if len(removed) == len(batch_samples):
        raise NothingLeft(
            f"the sample filter {name!r} has removed all {len(batch_samples)} samples of the batch, so nothing is left "
            "to train on: correct it, or drop such groups with rollout.dynamic_sampling_filter"
        )
    positions: dict[int, list[int]] = {}
    for sample in removed:
        positions.setdefault(sample.group_id, []).append(sample.sample_index)
    return {group_id: sorted(own) for group_id, own in positions.items()}


def _marked(
    mark: Callable[..., Any], args: Mapping[str, Any], groups: Sequence[Sequence[GradedSample]]
) -> list[GradedSample]:
    """Return the samples that a filter written for slime marks with `remove_sample`."""
    key = args.get("reward_key")
    of_slime = [[slime_sample(sample, len(group), key) for sample in group] for group in groups]
    mark(slime.Arguments(args), [list(group) for group in of_slime])
    pairs = zip(chain.from_iterable(of_slime), chain.from_iterable(groups), strict=True)
    return [sample for marked, sample in pairs if marked.remove_sample]
