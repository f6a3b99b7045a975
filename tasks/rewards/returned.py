"""Rewards that a generate function written for slime returns with its samples, in place of the grader's, as slime has
it.

| a returned sample | its reward |
|---|---|
| has a `reward` | that |
| has none | what the grader says of it alone |

Several of them are the trajectories of one sample, whose reward, by which filters and metrics go, is that of the last.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from cairn.storage.schemas import TRAJECTORY_REWARDS
from cairn.tasks.rewards.grading import Grading
from cairn.tasks.rewards.pool import Graded
from cairn.tasks.rewards.sample import Sample


class ReturnedRewards:
    """In the place of a grader, which it asks for the rewards that are missing. Thread-safe, as the grader is."""

    sees_whole_samples = True
    sees_tokens = True

    def __init__(self, grader: Grading, tokenizer: Callable[[], Any]) -> None:
        """`tokenizer`: gives that of the model."""
        self._grader = grader
        self._tokenizer = tokenizer

    @property
    def name(self) -> str:
        """Of the grader."""
        return self._grader.name

    @property
    def version(self) -> str:
        """Of the grader."""
        return self._grader.version

    @property
    def sees_messages(self) -> bool:
        """As the grader."""
        return self._grader.sees_messages

    @property
    def by_group(self) -> bool:
        """As the grader."""
        return self._grader.by_group

    def grade(self, samples: Sequence[Sample], groups: Sequence[Hashable] | None = None) -> list[Graded]:
        """See `Grading.grade`."""
        known = [self._known(sample) for sample in samples]
        missing = [(i, k) for i, rewards in enumerate(known) for k, reward in enumerate(rewards) if reward is None]
        asked = [self._alone(samples[i], k, len(known[i])) for i, k in missing]
        found = self._grader.grade(asked, None if groups is None else [groups[i] for i, _ in missing]) if asked else []
        graded = dict(zip(missing, found, strict=True))
        return [
            _together([graded.get((i, k)) or Graded(reward, grader="generate") for k, reward in enumerate(rewards)])
            for i, rewards in enumerate(known)
        ]

    def close(self) -> None:
        """Close the grader."""
        self._grader.close()

    def _known(self, sample: Sample) -> Sequence[float | None]:
        """Of each trajectory, the reward that was returned with it."""
        count = 1 + max((segment.trajectory for segment in sample.segments), default=0)
        return sample.rewards or [None] * count

    def _alone(self, sample: Sample, trajectory: int, count: int) -> Sample:
        """One trajectory of a sample, as the grader sees it."""
        if count > 1:
            segments = tuple(replace(one, trajectory=0) for one in sample.segments if one.trajectory == trajectory)
            ids = tuple(chain.from_iterable(one.ids for one in segments))
            sample = replace(
                sample,
                response=self._tokenizer().decode(ids, skip_special_tokens=True),
                response_with_special_tokens="".join(one.text for one in segments),
                response_ids=ids,
                segments=segments,
                rewards=(),
                roles=sample.roles[trajectory : trajectory + 1],
            )
        if self._grader.sees_whole_samples:
            return sample
        return Sample(sample.response, sample.label, sample.metadata)


def _together(parts: Sequence[Graded]) -> Graded:
    """A sample of which each trajectory was graded; failed where one of them is."""
    failed = next((part for part in parts if part.reward is None), None)
    if failed is not None or len(parts) == 1:
        return failed or parts[0]
    rewards = [part.reward for part in parts]
    return replace(parts[-1], components={**(parts[-1].components or {}), TRAJECTORY_REWARDS.name: rewards})
