"""Responses that were cut are not trained on: their rewards judge the length they were allowed, not the answer (DAPO,
Yu et al. 2025, section 3.4: overlong filtering)."""

from collections.abc import Sequence

from cairn.tasks.selecting.filters.sample import GradedSample


def remove(groups: Sequence[Sequence[GradedSample]]) -> list[GradedSample]:
    """The samples whose response was cut at the longest length allowed."""
    return [sample for group in groups for sample in group if sample.truncated]
