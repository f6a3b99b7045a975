"""What a step has of a grader, wherever it computes: processes (`pool`), or something outside (`outside`)."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from cairn.tasks.rewards.sample import Sample

GRADER_OPTIONS = (
    "reward.rm_type",
    "reward.rm_type_key",
    "reward.custom_rm_path",
    "reward.group_rm",
    "reward.reward_key",
    "reward.rm_timeout",
    "reward.rm_memory",
    "reward.rm_batch_size",
    "reward.rm_url",
    "reward.judge",
    "reward.code",
)
"""What a step that has samples graded reads of the configuration for its graders, but for a reward model."""


@dataclass(frozen=True)
class Graded:
    """What a grader said of one sample. Without a reward the sample has failed, and `error` says how."""

    reward: float | None
    components: dict[str, Any] | None = None
    error: str | None = None
    tries: int = field(default=1, compare=False)
    """Times that it was graded."""
    waited: float = field(default=0.0, compare=False)
    """Seconds between them."""
    grader: str = field(default="", compare=False)
    """Who graded it; empty where nobody did."""
    version: str = field(default="", compare=False)
    """Of the grader."""


class Grading(Protocol):
    """Grades batches. Thread-safe."""

    @property
    def name(self) -> str:
        """Of the grader."""

    @property
    def version(self) -> str:
        """Of the grader: it changes with its code, and with whom it asks for what."""

    @property
    def sees_whole_samples(self) -> bool:
        """Whether the grader reads more of a sample than response, label and metadata."""

    @property
    def sees_tokens(self) -> bool:
        """Whether it may read a sample's tokens, too. One that does not reads the text with special tokens for no more
        than the tags of thoughts in it: see `cairn.flows.history.rescore`."""

    @property
    def sees_messages(self) -> bool:
        """Whether it reads the prompt as the data row has it, too."""

    @property
    def by_group(self) -> bool:
        """Whether it grades whole groups."""

    def grade(self, samples: Sequence[Sample], groups: Sequence[Hashable] | None = None) -> list[Graded]:
        """Grade a batch; the results stand in its order. `groups`: which group each sample is of.

        Raises:
            GraderUnavailable: the machine, or what the grader asks, did not let it work.
            GraderFailed: it cannot work at all.
        """

    def close(self) -> None:
        """End what it runs; a batch under way ends in GraderFailed."""


class Rememberable(Grading, Protocol):
    """One whose answers can be kept."""

    def graded_by(self, sample: Sample) -> tuple[str, str]:
        """Name and version of the grader that a sample is graded by. Raises BadPlugin where its row names none."""

    def can_grade(self, sample: Sample) -> None:
        """Hear of a sample that got a reward before, perhaps in another process: where some fail, it tells by this one
        whether it is they or the grader."""


Grader = Callable[..., Any]


BOXED = "boxed_"
"""Before the name of one of ours: it is given what stands in the last box in the place of the response."""


OUTSIDE = ("code", "judge", "remote_rm", "reward_model")
"""Those of ours that ask something outside: `cairn.tasks.grading.outside.kinds`."""


class TryAgain(Exception):
    """Raised by a grader: something that it asks does not answer now, and may later."""


class Takes(StrEnum):
    """What a grader is called with."""

    TEXTS = "texts"
    """Response, label and metadata of one sample."""
    SAMPLE = "sample"
    """One whole sample."""
    SAMPLES = "samples"
    """A list of whole samples."""
    SLIME_SAMPLE = "args, sample"
    """What slime calls it with: see `cairn.tasks.slime`."""
    SLIME_SAMPLES = "args, samples"
    """The same of a list."""

    @property
    def several(self) -> bool:
        """Samples that are graded in one call."""
        return self in (Takes.SAMPLES, Takes.SLIME_SAMPLES)


@dataclass(frozen=True)
class NamedGrader:
    """Which grader, where it is, which version of it, and how it is called."""

    name: str
    path: str
    """For `cairn.configs.plugins.load_callable`."""
    version: str
    """Changes whenever the grader's code does."""
    takes: Takes
    waits: bool
    """It is a coroutine function."""
    wrong: float | None = None
    """What one of ours that reads responses gives to a wrong answer, and so to one over which its process gets lost;
    None: such a sample fails."""

    @property
    def boxed(self) -> bool:
        """It is given what stands in the last box in the place of the response."""
        return self.path != self.name and self.name.startswith(BOXED)

    @property
    def whole_sample(self) -> bool:
        """It takes `cairn.tasks.rewards.sample.Sample` in place of response, label and metadata."""
        return self.takes is not Takes.TEXTS

    @property
    def sees_tokens(self) -> bool:
        """It may read a whole sample's tokens too. Of ours only those that ask something outside do."""
        return self.whole_sample and (self.path == self.name or self.name in OUTSIDE)


_PAYS = {"dapo": (-1.0, 1.0)}
"""Of the graders that pay something else than 0 for a wrong answer and 1 for a right one, what."""


def share_of_right(reward: float, grader: str) -> float:
    """A reward of a grader, or a mean of its rewards, as the share of answers that are right: 0 of wrong ones alone, 1
    of right ones, whatever these are paid."""
    wrong, right = _paid(grader)
    return (reward - wrong) / (right - wrong)


def _paid(grader: str) -> tuple[float, float]:
    """What a wrong and what a right answer gets."""
    return _PAYS.get(grader.removeprefix(BOXED), (0.0, 1.0))
