"""Do not train on responses that were cut off: their rewards judge the allowed length, not the answer (DAPO, Yu et al.
2025, section 3.4: overlong filtering)."""

from collections.abc import Sequence

from cairn.tasks.grading.graded import GradedSample


def remove(groups: Sequence[Sequence[GradedSample]]) -> list[GradedSample]:
    """Return the samples whose response was cut off at the maximum length."""
    return [sample for group in groups for sample in group if sample.truncated]
