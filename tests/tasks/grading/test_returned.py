"""Rewards that a generate function of slime returns stand, sample by sample; the grader gives the others."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.flows.driver.sources import open_graders
from cairn.tasks.grading.opening import ReturnedRewards
from cairn.tasks.grading.shaping import with_own_rewards
from cairn.tasks.rewards.grader import Graded
from cairn.tasks.rewards.sample import ResponseSegment, Sample
from tests.tiny_run import tiny_config

SLIME = "async def generate(args, sample, sampling_params):\n    return sample\n"
NATIVE = "async def generate(ctx, sample):\n    return None\n"


class Lengths:
    """Grades a response by its letters, and fails one without any."""

    name, version, sees_whole_samples, sees_tokens, sees_messages, by_group = "letters", "1", False, False, False, False

    def __init__(self) -> None:
        self.received: list[tuple[Sample, Any]] = []

    def grade(self, samples: Sequence[Sample], groups: Sequence[Any] | None = None) -> list[Graded]:
        self.received += zip(samples, groups or (), strict=True)
        return [
            Graded(float(len(one.response)), {"letters": 1}) if one.response else Graded(None, error="no letter")
            for one in samples
        ]

    def close(self) -> None:
        pass


@pytest.fixture
def letters() -> Lengths:
    return Lengths()


@pytest.fixture
def grader(letters: Lengths) -> ReturnedRewards:
    tokenizer = SimpleNamespace(decode=lambda ids, **how: "".join(map(chr, ids)))
    return ReturnedRewards(letters, lambda: tokenizer)


def sample(*texts: str, rewards: tuple[float | None, ...] = ()) -> Sample:
    segments = [
        ResponseSegment(tuple(map(ord, letter)), letter, True, trajectory)
        for trajectory, text in enumerate(texts)
        for letter in text
    ]
    return Sample(texts[-1], "7", segments=tuple(segments), rewards=rewards)


def test_returned_rewards_stand_and_the_others_are_graded_each_by_itself(
    grader: ReturnedRewards, letters: Lengths
) -> None:
    samples = [
        sample("abc"),
        sample("abc", rewards=(5.0,)),
        sample("ab", "a", "abcd"),
        sample("ab", "a", rewards=(0.5, None)),
    ]
    found = [
        with_own_rewards(one, count)
        for one, count in zip(grader.grade(samples, [3, 3, 4, 4]), (1, 1, 3, 2), strict=True)
    ]
    assert [(graded.reward, own) for graded, own in found] == [
        (3.0, None),
        (5.0, None),
        (4.0, [2.0, 1.0, 4.0]),
        (1.0, [0.5, 1.0]),
    ]
    assert letters.received == [
        (Sample("abc", "7"), 3),
        (Sample("ab", "7"), 4),
        (Sample("a", "7"), 4),
        (Sample("abcd", "7"), 4),
        (Sample("a", "7"), 4),
    ]
    assert found[2][0].components == {"letters": 1}
    assert grader.grade([sample("abc", rewards=(5.0,))])[0].grader == "generate"


def test_a_sample_fails_with_any_that_cannot_be_graded(grader: ReturnedRewards) -> None:
    (failed,) = grader.grade([sample("ab", "", "a", rewards=(1.0, None, 2.0))], [0])
    assert (failed.reward, failed.error) == (None, "no letter")


@pytest.mark.parametrize(("code", "stands"), [(SLIME, True), (NATIVE, False)])
def test_only_functions_of_slime_take_the_place_of_the_grader(
    tiny_assets: Path, tmp_path: Path, code: str, stands: bool
) -> None:
    (tmp_path / "own.py").write_text(code)
    config = tiny_config(tiny_assets, rollout={"custom_generate_function_path": f"{tmp_path / 'own.py'}:generate"})
    with ExitStack() as stack:
        graders = open_graders(config, stack)
        assert [isinstance(grader, ReturnedRewards) for grader in graders.values()] == [stands] * len(graders)
