"""Filters written for slime: see `cairn.tasks.slime`."""

from collections.abc import Callable, Sequence
from typing import Any

from cairn.configs.plugins import BadPlugin
from cairn.tasks import slime
from cairn.tasks.filters.decision import FilterDecision
from cairn.tasks.filters.sample import GradedSample


def graded(sample: GradedSample, group_size: int) -> slime.OfGroup:
    """What a filter is given."""
    return slime.OfGroup(
        prompt=sample.prompt,
        tokens=[*sample.prompt_ids, *sample.response_ids],
        response=sample.response,
        response_length=sample.length,
        label=sample.label,
        reward=sample.reward,
        metadata=dict(sample.metadata),
        status=slime.Status(sample.status),
        group_index=sample.group_id,
        index=sample.group_id * group_size + sample.sample_index,
        loss_mask=list(sample.loss_mask),
    )


def judged(keep: Callable[..., Any], samples: Sequence[GradedSample]) -> FilterDecision:
    """What a filter says of the samples of a group. Raises BadPlugin where it says something else."""
    found = keep(slime.Arguments({}), [graded(sample, len(samples)) for sample in samples])
    said = found if hasattr(found, "keep") else slime.DynamicFilterOutput(found)
    kept, reason = bool(said.keep), getattr(said, "reason", None)
    if reason is not None and not isinstance(reason, str):
        raise BadPlugin(f"the filter gave {reason!r} as the reason: let it be text")
    spare = bool(getattr(said, "keep_when_insufficient", False))
    return FilterDecision(kept, None if kept else reason or "not_kept", keep_when_insufficient=spare and not kept)
