"""A grader that asks nothing twice: what it answered before lies in the store, see `cairn.storage.answers`."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from typing import Any

from cairn.storage.answers import Answer, Answers, prompt_digest, question_digest
from cairn.storage.store import Store
from cairn.tasks.rewards.grading import Rememberable
from cairn.tasks.rewards.outside.asking import Answered, OutsideGraders
from cairn.tasks.rewards.pool import Graded
from cairn.tasks.rewards.sample import Sample

Ask = Callable[[Sequence[Sample], Answered], list[Graded]]


class Remembered:
    """In the place of a grader. Samples that ask the same share an answer. Thread-safe."""

    by_group = False
    sees_tokens = True  # by which an answer is found

    def __init__(self, grader: Rememberable, store: Store, at_a_time: int, reward_key: str) -> None:
        """`at_a_time`: samples after which the answers of a grader in processes are written. `reward_key`: what of them
        is the reward, as of an answer nothing else is kept."""
        self._grader = grader
        self._at_a_time = at_a_time
        self._answers = Answers(store, grader.name, f"{grader.version} {reward_key}")

    @property
    def name(self) -> str:
        """Of the grader."""
        return self._grader.name

    @property
    def version(self) -> str:
        """Of the grader."""
        return self._grader.version

    @property
    def sees_whole_samples(self) -> bool:
        """As the grader."""
        return self._grader.sees_whole_samples

    @property
    def sees_messages(self) -> bool:
        """As the grader."""
        return self._grader.sees_messages

    def grade(self, samples: Sequence[Sample], groups: Sequence[Hashable] | None = None) -> list[Graded]:
        """See `Grading.grade`. What a killed process had asked and not yet been told is asked again."""
        who = [self._grader.graded_by(sample) for sample in samples]
        questions = [self._question(sample, *one) for sample, one in zip(samples, who, strict=True)]
        asked = dict(zip(questions, zip(samples, who, strict=True), strict=True))
        graded = {
            question: Graded(
                one.reward,
                None if one.components is None else dict(one.components),
                one.error,
                grader=asked[question][1][0],
                version=asked[question][1][1],
            )
            for question, one in self._answers.find(questions).items()
        }
        left = [question for question in asked if question not in graded]
        if left:
            answered = next((question for question, one in graded.items() if one.reward is not None), None)
            if answered is not None:
                self._grader.can_grade(asked[answered][0])
            with self._answers.log() as log:

                def keep(position: int, one: Graded) -> None:
                    about = prompt_digest(asked[left[position]][0].prompt)
                    log.append((left[position], Answer(one.reward, one.components, one.error, about)))

                found = self._ask([asked[question][0] for question in left], keep)
            graded |= dict(zip(left, found, strict=True))
        return [graded[question] for question in questions]

    def close(self) -> None:
        """Close the grader."""
        self._grader.close()

    def _question(self, sample: Sample, grader: str, version: str) -> str:
        """Digest of what the grader sees of it, and of which one where it is the row's own."""
        if isinstance(self._grader, OutsideGraders):
            try:
                return question_digest(self._grader.question(sample))
            except ValueError:  # it will say so when it is asked
                return question_digest(_seen(sample))
        whole = self._grader.sees_whole_samples
        seen: Any = _seen(sample) if whole else [sample.response, sample.label, sample.metadata]
        if grader != self.name:  # in the folder of another, under whose version
            seen = [_seen(sample), grader, version]
        return question_digest(seen)

    def _ask(self, samples: Sequence[Sample], keep: Answered) -> list[Graded]:
        if isinstance(self._grader, OutsideGraders):
            return self._grader.ask(samples, keep)
        found: list[Graded] = []
        for start in range(0, len(samples), self._at_a_time):
            some = self._grader.grade(samples[start : start + self._at_a_time])
            for position, one in enumerate(some, start):
                if one.reward is not None:  # an error may pass
                    keep(position, one)
            found += some
        return found


def _seen(sample: Sample) -> dict[str, Any]:
    """All of a sample; without what there is only where user code gives rewards and roles, if it gave none: answers of
    earlier versions are found by the same digest."""
    seen = asdict(sample)
    for name in ("rewards", "roles"):
        if not seen[name]:
            del seen[name]
    for segment in seen["segments"]:
        if segment["reward"] is None:
            del segment["reward"]
    return seen
