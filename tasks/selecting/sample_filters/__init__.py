"""Samples of a full batch that are not trained on, though their rewards count in the baselines of their groups. One
filter a file, `remove(groups) -> samples`."""

from collections.abc import Iterable, Sequence

from cairn.configs.errors import Failure
from cairn.configs.kinds import SAMPLE_FILTER
from cairn.configs.plugins import BadPlugin
from cairn.tasks.grading.graded import GradedSample


class NothingLeft(Failure):
    """Nothing is left to train on, of a batch or of one of its optimizer steps."""


def removed_by(name: str, groups: Sequence[Sequence[GradedSample]]) -> dict[int, list[int]]:
    """Return the samples of a batch that `rollout.rollout_sample_filter_path` removes: positions in their groups,
    ascending, by the group's id.

    Raises:
        BadPlugin: the filter is not available, takes other arguments, or returns anything else than samples of the
            batch.
        NothingLeft: it removes all samples.
    """
    returned = SAMPLE_FILTER.load(name)([list(group) for group in groups])
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
