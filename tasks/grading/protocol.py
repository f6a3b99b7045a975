"""What a step has of a grader, wherever it computes: processes (`pool`), or something outside (`outside`)."""

from collections.abc import Hashable, Sequence
from typing import Protocol

from cairn.tasks.batch.sample import Sample
from cairn.tasks.grading.pool import Graded

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
