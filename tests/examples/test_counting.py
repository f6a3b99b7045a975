"""The counting task: long-tailed answers, and held-out prompts that are shown nowhere."""

import random
import re
from itertools import islice

import numpy as np

from examples.counting.build import demonstrations, problems
from examples.quickstart.task import is_held_out

PROMPT = re.compile(r"Count down from (\d+), then sort (\d) (\d) (\d)\.")


def asked(prompt: str) -> tuple[int, list[int]]:
    found = PROMPT.fullmatch(prompt)
    assert found is not None
    first, *digits = map(int, found.groups())
    return first, digits


def answered(text: str) -> tuple[list[int], list[int]]:
    counted, digits = ([int(number) for number in part.split()] for part in text.split(":"))
    return counted, digits


def test_right_answers_are_long_tailed() -> None:
    counts = [len(answered(row["label"])[0]) for row in islice(problems(0, held_out=False), 4000)]
    tokens = 3 * np.array(counts) + 11  # with the box, the digits and the end, more than there are
    median, last = np.percentile(tokens, [50, 99])
    assert last >= 8 * median
    assert max(counts) <= 99


def test_labels_count_down_and_sort() -> None:
    for row in islice(problems(0, held_out=True), 500):
        first, digits = asked(row["prompt"])
        assert answered(row["label"]) == (list(range(first, 0, -1)), sorted(digits))


def test_nothing_that_is_held_out_is_shown_or_trained_on() -> None:
    trained = {row["prompt"] for row in islice(problems(0, held_out=False), 2000)}
    shown = {row["prompt"] for row in islice(demonstrations(random.Random(0)), 2000)}
    held_out = {row["prompt"] for row in islice(problems(0, held_out=True), 256)}
    assert not any(map(is_held_out, trained | shown))
    assert all(map(is_held_out, held_out))


def test_demonstrations_count_right_and_most_swap_two_neighbours() -> None:
    wrong = 0
    for row in islice(demonstrations(random.Random(0)), 1000):
        first, digits = asked(row["prompt"])
        counted, shown = answered(row["response"].removeprefix("\\boxed{").removesuffix("}"))
        assert counted == list(range(first, 0, -1))
        right = sorted(digits)
        assert shown in (right, [right[1], right[0], right[2]], [right[0], right[2], right[1]])
        wrong += shown != right
    assert 650 < wrong < 750
