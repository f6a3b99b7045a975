"""The counting task: long-tailed answers, and held-out prompts that are shown nowhere."""

import random
from itertools import islice

import numpy as np

from examples.counting.build import demonstrations, problems
from examples.quickstart.task import is_held_out


def test_right_answers_are_long_tailed() -> None:
    counts = [len(row["label"].split()) for row in islice(problems(0, held_out=False), 4000)]
    tokens = 3 * np.array(counts) + 4  # with the box and the end, more than there are
    median, last = np.percentile(tokens, [50, 99])
    assert last >= 8 * median
    assert max(counts) <= 80


def test_nothing_that_is_held_out_is_shown_or_trained_on() -> None:
    trained = {row["prompt"] for row in islice(problems(0, held_out=False), 2000)}
    shown = {row["prompt"] for row in islice(demonstrations(random.Random(0)), 2000)}
    asked = {row["prompt"] for row in islice(problems(0, held_out=True), 256)}
    assert not any(map(is_held_out, trained | shown))
    assert all(map(is_held_out, asked))


def test_most_demonstrations_leave_out_one_number_and_never_the_first() -> None:
    wrong = 0
    for row in islice(demonstrations(random.Random(0)), 1000):
        first, last = (int(word.rstrip(".")) for word in row["prompt"].split() if word[0].isdigit())
        numbers = [int(word) for word in row["response"].removeprefix("\\boxed{").removesuffix("}").split()]
        assert numbers[0] == first
        missing = set(range(first, last + 1)) - set(numbers)
        assert len(missing) <= 1
        wrong += len(missing)
    assert 500 < wrong < 750
